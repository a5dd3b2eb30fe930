"""What every workflow is that learns from its own samples: its groups, one step, and the loop around them.

A workflow's file has a Config, `groups`, which launches the worker groups, and `step`, which is the algorithm. This
base knows the controller, the loop and the run's files, and none of the models.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from rill.errors import CheckpointError, PeerDiedError, RillError, WorkerError
from rill.journal.checkpoints import RunCheckpoints, place_of, step_of, whole_checkpoints
from rill.planning.pilot import Pilot
from rill.planning.replan import Replanner
from rill.runtime.group import WorkerGroup
from rill.telemetry.run import Run
from rill.workflows import PRELOAD
from rill.workflows.config import OnlineConfig
from rill.workflows.flow import Flow
from rill.workflows.launch import Launcher, open_cluster
from rill.workflows.loop import Loop, Observer, StepReport
from rill.workflows.steering import Steering

log = logging.getLogger(__name__)


class Workflow(ABC):
    Config: ClassVar[type[OnlineConfig]]
    preload: ClassVar[Sequence[str]] = PRELOAD
    """Modules that its workers need."""

    rollout: WorkerGroup[Any]
    actor: WorkerGroup[Any]

    def __init__(self, config: OnlineConfig, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    @abstractmethod
    def groups(self, launch: Launcher) -> None:
        """Launch the worker groups; `self.rollout`, called "rollout", and `self.actor`, "actor", are two of them."""

    @abstractmethod
    def step(self, flow: Flow) -> None:
        """One step, once per batch: calls that return at once."""

    def run(self, pilot: Pilot | None = None) -> None:
        """Warm up or resume, train to the last step, leave the model in the run folder.

        Where a rank of a trainer is lost, whose peers wait for it in the middle of a step, a scorer or the controller,
        the next session goes on from the last checkpoint and the token log: nothing is sampled twice, and the trainer
        takes the batches that it had taken. Engines and environments stay as they are where they can; else the cluster
        is new.

        `pilot`: who may change the plan between steps; unset: a run that was given a plan follows it, and replans.
        """
        self._restarts_left = self.config.loop.max_relaunches
        while not self._is_done_on_a_cluster(pilot):
            pass

    def _is_done_on_a_cluster(self, pilot: Pilot | None) -> bool:
        """Sessions with the same engines. False: the next one needs a new cluster."""
        with open_cluster(self.config.cluster, self.folder, self.preload) as cluster:
            launch: Launcher | None = Launcher(self.config, self.folder, self.observers, cluster)
            while launch is not None:
                try:
                    self._train(launch, pilot)
                    return True
                except RillError as error:
                    lost = launch.lost() if may_follow_a_death(error, launch.is_ready) else []
                    if not lost or self._restarts_left == 0:
                        raise
                    self._restarts_left -= 1
                    self._tell_restart(lost, str(error).splitlines()[0])
                    self.config = launch.config
                launch = launch.again()
        return False

    def _tell_restart(self, lost: Sequence[str], reason: str) -> None:
        log.warning("%s is lost (%s): the run goes on", ", ".join(lost), reason)
        found = whole_checkpoints(self.folder)
        step, where = (step_of(found[-1]), place_of(found[-1])) if found else (0, "the start")
        notes = (f"{', '.join(lost)} lost: going on from {where} and the token log",)
        steps = self.config.loop.steps
        StepReport(step=step, num_steps=steps, metrics={}, phase="restart", notes=notes).tell(self.observers)

    def _train(self, launch: Launcher, pilot: Pilot | None) -> None:
        config, timeout_s = self.config, self.config.loop.step_timeout_s
        controller = launch.controller()
        self.groups(launch)
        launch.ready()
        flow = Flow(launch.fleet())
        keep, compacts = config.loop.keep_checkpoints, not config.journal.keep
        checkpoints = RunCheckpoints(self.folder, launch.trained, keep, timeout_s, compacts=compacts)
        if pilot is None:
            pilot = Replanner.of(config, self.folder, launch.session.cluster.devices)
        with checkpoints:
            loop = Loop(flow, self.step, checkpoints, self.observers)
            steering = Steering(launch, loop, pilot)
            loop.observers.append(steering.observe)
            loop.restore()
            for damage in controller.start(launch.session.flows).wait(timeout_s=timeout_s)[0]:
                log.warning("the token log is damaged, and what was lost is sampled again: %s", damage)
            if launch.was_warmed_up:
                loop.save()  # what the supervised steps made is not lost before the first checkpoint
            loop.run()
            steering.record()
        self.actor.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=timeout_s)


def may_follow_a_death(error: RillError, is_ready: bool) -> bool:
    """Whether a lost process can be behind it. What a worker raised may be what its peer's death looks like to it, but
    not before all are ready: then its own start failed, and would fail again. A checkpoint that a worker cannot write
    may lack a peer's part."""
    if isinstance(error, CheckpointError) and isinstance(error.__cause__, WorkerError):
        return is_ready
    if isinstance(error, WorkerError):
        return is_ready and not isinstance(error.__cause__, RillError)
    return isinstance(error, PeerDiedError)
