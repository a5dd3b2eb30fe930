"""What every RL workflow is: its groups, one step, and the loop around them.

A workflow's file has a Config, `groups`, which launches the worker groups, and `step`, which is the algorithm. This
base knows the controller, the loop and the run's files, and none of the models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rill.journal.checkpoints import RunCheckpoints
from rill.runtime.group import WorkerGroup
from rill.telemetry.run import Run
from rill.workflows.actor import ActorWorker
from rill.workflows.fleet import Engines
from rill.workflows.flow import Flow
from rill.workflows.launch import Launcher, open_cluster
from rill.workflows.loop import Loop, Observer
from rill.workflows.replanning import Replanner
from rill.workflows.rl_config import RLConfig
from rill.workflows.steering import Pilot, Steering


class Workflow(ABC):
    Config: ClassVar[type[RLConfig]]

    rollout: Engines
    actor: WorkerGroup[ActorWorker]

    def __init__(self, config: RLConfig, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    @abstractmethod
    def groups(self, launch: Launcher) -> None:
        """Launch the worker groups; `self.rollout` and `self.actor` are two of them."""

    @abstractmethod
    def step(self, flow: Flow) -> None:
        """One step, once per batch: calls that return at once."""

    def run(self, pilot: Pilot | None = None) -> None:
        """Warm up or resume, train to the last step, leave the model in the run folder. `pilot`: who may change the
        plan between steps; unset: a run that was given a plan follows it, and replans."""
        config = self.config
        timeout_s = config.loop.step_timeout_s
        with open_cluster(config.cluster, self.folder) as cluster:
            launch = Launcher(config, self.folder, self.observers, cluster)
            controller = launch.controller()
            self.groups(launch)
            launch.ready()
            launch.colocate()
            flow = Flow(
                config.flow,
                config.loop,
                controller,
                launch.fleet(self.rollout, self.actor),
                launch.seating,
                launch.flows,
                launch.channel,
            )
            with RunCheckpoints(
                self.folder, launch.trained, config.loop.keep_checkpoints, timeout_s
            ) as checkpoints:
                loop = Loop(
                    config.loop,
                    flow,
                    self.step,
                    controller,
                    checkpoints,
                    [*self.observers, lambda report: steering.observe(report)],
                    eval_every=config.eval.every,
                    has_evals=bool(launch.evals),
                )
                steering = Steering(
                    run=self.folder,
                    launch=launch,
                    loop=loop,
                    controller=controller,
                    checkpoints=checkpoints,
                    engines=self.rollout,
                    actor=self.actor,
                    pilot=pilot or Replanner.of(config, self.folder),
                )
                is_resumed = loop.restore()
                controller.start(launch.flows).wait(timeout_s=timeout_s)
                if not is_resumed and config.sft.steps:
                    loop.save()  # what the supervised steps made is not lost before the first checkpoint
                loop.run()
                steering.record()
            self.actor.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=timeout_s)
