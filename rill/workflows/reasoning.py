"""GRPO and its relatives on verifiable problems: sample groups, reward them, learn from the difference.

The file is the algorithm. Where the two groups run, whether they share devices, and how far sampling runs ahead of
training (`loop.max_lag`) is the recipe's business; nothing here changes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rill.config import Config
from rill.runtime.channel import Channel
from rill.telemetry.run import Run
from rill.workflows.actor import ActorWorker
from rill.workflows.assembly import RLConfig, held_out_prompts, open_cluster, open_prompts, threads_of
from rill.workflows.checkpoints import RunCheckpoints
from rill.workflows.evaluation import Evaluator
from rill.workflows.fleet import Fleet
from rill.workflows.jobs import StepPlan
from rill.workflows.loop import Loop, Observer, Parts
from rill.workflows.rollout import RolloutWorker
from rill.workflows.warmup import warm_up


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: str = "all"
    actor: str = "all"


class ReasoningWorkflow:
    class Config(RLConfig):
        workflow: Literal["reasoning"] = "reasoning"
        placement: PlacementConfig = PlacementConfig()

    def __init__(self, config: Config, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config, timeout_s = self.config, self.config.loop.step_timeout_s
        with open_cluster(config.cluster, self.folder) as cluster:
            threads = threads_of(config.cluster, cluster)
            rollout = RolloutWorker.launch_async(
                cluster,
                name="rollout",
                placement=config.placement.rollout,
                threads=threads,
                config=config.rollout,
                algorithm=config.algorithm,
                model=config.model,
                sync=config.sync,
                seed=config.seed,
                run_dir=str(self.folder.path.resolve()),
            )
            actor = ActorWorker.launch_async(
                cluster,
                name="actor",
                placement=config.placement.actor,
                threads=threads,
                config=config.trainer,
                algorithm=config.algorithm,
                sync=config.sync,
            )
            jobs = Channel.create(cluster, "jobs", capacity_items=1_000_000)
            rollouts, outcomes = Channel.create(cluster, "rollouts"), Channel.create(cluster, "outcomes")
            rollout.ready(timeout_s)
            actor.ready(timeout_s)

            def train_step(plan: StepPlan) -> Mapping[str, float]:
                figures: Mapping[str, float] = actor.train(rollouts, plan).wait(timeout_s=timeout_s)[0]
                return figures

            fleet = Fleet(rollout, actor, config.sync, interrupt=config.loop.interrupt)
            parts = Parts(
                fleet=fleet,
                source=open_prompts(config),
                group_size=config.rollout.group_size,
                jobs=jobs,
                rollouts=rollouts,
                outcomes=outcomes,
                train_step=train_step,
                evaluator=Evaluator(config.eval, fleet, held_out_prompts(config), timeout_s),
                checkpoints=RunCheckpoints(
                    self.folder, {"actor": actor}, config.loop.keep_checkpoints, timeout_s
                ),
            )
            loop = Loop(config.loop, parts, self.observers)
            if not loop.restore():
                warm_up(actor, config.data, config.warmup, config.seed, self.observers, timeout_s)
            loop.run()
            actor.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=timeout_s)
