"""GRPO and its relatives on verifiable problems: sample groups, reward them, learn from the difference.

The file is the algorithm. Where the groups run, whether they share devices, and how far sampling runs ahead of training
(`loop.max_lag`) is the recipe's business; nothing here changes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import model_validator

from rill.algorithms import Algorithm, Need
from rill.config import Config
from rill.runtime.channel import Channel
from rill.runtime.handle import Handle
from rill.telemetry.run import Run
from rill.training.score import ScoreModel
from rill.workflows.assembly import RLConfig, RLSetup, open_cluster
from rill.workflows.jobs import StepPlan
from rill.workflows.loop import Observer
from rill.workflows.sections import Seats
from rill.workflows.stages import ReferenceWorker

Stage = Callable[[Channel, Channel, StepPlan], Handle]


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: Seats = "all"
    actor: Seats = "all"
    inference: Seats | None = None
    """Recomputes log π_old where a batch has several optimizer steps. Unset: the actor does it itself."""
    reference: Seats = "all"
    """Used only where the algorithm has a KL term."""


class ReasoningWorkflow:
    class Config(RLConfig):
        workflow: Literal["reasoning"] = "reasoning"
        placement: PlacementConfig = PlacementConfig()

        @model_validator(mode="after")
        def _inference_has_work(self) -> ReasoningWorkflow.Config:
            if (
                self.placement.inference is not None
                and self.trainer.num_epochs * self.trainer.mini_batches == 1
            ):
                raise ValueError(
                    "placement.inference has nothing to do: with one optimizer step per batch (trainer.num_epochs and "
                    "trainer.mini_batches are 1) the old log-probabilities are the current ones. Leave it unset"
                )
            return self

    def __init__(self, config: Config, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config = self.config
        with open_cluster(config.cluster, self.folder) as cluster:
            setup = RLSetup(config, self.folder, cluster, self.observers)
            setup.launch_policy(config.placement.rollout, config.placement.actor)
            stages = [(stage, Channel.create(cluster, name)) for name, stage in self._stages(setup).items()]

            def train_step(plan: StepPlan) -> Mapping[str, float]:
                source, calls = setup.rollouts, []
                for stage, target in stages:
                    calls.append(stage(source, target, plan))
                    source = target
                calls.append(setup.actor.train(source, plan))
                return [setup.wait(call) for call in calls][-1]

            setup.run_loop(train_step, {"actor": setup.actor})

    def _stages(self, setup: RLSetup) -> dict[str, Stage]:
        """What every sample passes between the engines and the trainer, in order."""
        stages: dict[str, Stage] = {}
        if self.config.placement.inference is not None:
            inference = setup.launch_inference(self.config.placement.inference)
            stages["scored"] = lambda source, target, plan: inference.score(
                source, target, plan, setup.manifest()
            )
        if Need.REF_LOGPROBS in Algorithm(self.config.algorithm).needs:
            model = ScoreModel.Config(
                model=setup.initial_model(), temperature=self.config.trainer.temperature
            )
            reference = setup.launch(
                ReferenceWorker, "reference", self.config.placement.reference, config=model
            )
            stages["referenced"] = reference.score
        return stages
