"""GRPO and its relatives on verifiable problems: sample groups, reward them, learn from the difference.

The file is the algorithm. Where the groups run, whether they share devices, and how far sampling runs ahead of training
(`loop.max_lag`) is the recipe's business; nothing here changes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rill.algorithms import Algorithm, Need
from rill.config import Config
from rill.runtime.channel import Channel
from rill.telemetry.run import Run
from rill.training.score import ScoreModel
from rill.workflows.assembly import RLConfig, RLSetup, open_cluster
from rill.workflows.jobs import StepPlan
from rill.workflows.loop import Observer, TrainStep
from rill.workflows.sections import Seats
from rill.workflows.stages import ReferenceWorker


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: Seats = "all"
    actor: Seats = "all"
    reference: Seats = "all"
    """Used only where the algorithm has a KL term."""


class ReasoningWorkflow:
    class Config(RLConfig):
        workflow: Literal["reasoning"] = "reasoning"
        placement: PlacementConfig = PlacementConfig()

    def __init__(self, config: Config, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config = self.config
        with open_cluster(config.cluster, self.folder) as cluster:
            setup = RLSetup(config, self.folder, cluster, self.observers)
            setup.launch_policy(config.placement.rollout, config.placement.actor)
            has_reference = Need.REF_LOGPROBS in Algorithm(config.algorithm).needs
            train_step = self._with_reference(setup) if has_reference else self._without_reference(setup)
            setup.run_loop(train_step, {"actor": setup.actor})

    def _without_reference(self, setup: RLSetup) -> TrainStep:
        def train_step(plan: StepPlan) -> Mapping[str, float]:
            return setup.wait(setup.actor.train(setup.rollouts, plan))

        return train_step

    def _with_reference(self, setup: RLSetup) -> TrainStep:
        model = ScoreModel.Config(model=setup.initial_model(), temperature=self.config.trainer.temperature)
        reference = setup.launch(ReferenceWorker, "reference", self.config.placement.reference, config=model)
        referenced = Channel.create(setup.cluster, "referenced")

        def train_step(plan: StepPlan) -> Mapping[str, float]:
            stages = [reference.score(setup.rollouts, referenced, plan), setup.actor.train(referenced, plan)]
            return [setup.wait(stage) for stage in stages][-1]

        return train_step
