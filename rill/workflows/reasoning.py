"""GRPO and its relatives on verifiable problems: sample groups, reward them, learn from the difference.

The file is the algorithm. Where the groups run, whether they share devices, and how far sampling runs ahead of training
(`loop.max_lag`) is the recipe's business; nothing here changes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from rill.algorithms import Algorithm, Need
from rill.config import Config
from rill.telemetry.run import Run
from rill.workflows.assembly import RLConfig, RLSetup, open_cluster
from rill.workflows.jobs import StepPlan, TrainedStep
from rill.workflows.loop import Observer
from rill.workflows.sections import Seats
from rill.workflows.stage_chain import Stage


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: Seats = "all"
    actor: Seats = "all"
    inference: Seats | None = None
    """Recomputes log π_old where a batch has several optimizer steps. Unset: the actor does it itself."""
    reference: Seats = "all"
    """Used only where the algorithm has a KL term."""
    reward: Seats = "all"
    """Used only with a [reward_model]."""
    teacher: Seats = "all"
    """Used only for distillation on the advantage."""


class ReasoningWorkflow:
    class Config(RLConfig):
        workflow: Literal["reasoning"] = "reasoning"
        placement: PlacementConfig = PlacementConfig()

        @model_validator(mode="after")
        def _inference_has_work(self) -> ReasoningWorkflow.Config:
            if (
                self.placement.inference is not None
                and self.trainer.num_epochs * self.trainer.num_mini_batches == 1
            ):
                raise ValueError(
                    "placement.inference has nothing to do: with one optimizer step per batch (trainer.num_epochs and "
                    "trainer.num_mini_batches are 1) the old log-probabilities are the current ones. Leave it unset"
                )
            return self

    def __init__(self, config: Config, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config, seats = self.config, self.config.placement
        with open_cluster(config.cluster, self.folder) as cluster:
            setup = RLSetup(config, self.folder, cluster, self.observers)
            setup.launch_policy(seats.rollout, seats.actor, seats.inference)
            stages: dict[str, Stage] = {}
            if config.reward_model is not None:
                stages["rewarded"] = setup.launch_reward(seats.reward)
            if seats.inference is not None:
                stages["scored"] = setup.launch_inference(seats.inference)
            needs = Algorithm(config.algorithm).needs
            if Need.REF_LOGPROBS in needs:
                stages["referenced"] = setup.launch_reference(seats.reference)
            if Need.TEACHER_LOGPROBS in needs:
                stages["taught"] = setup.launch_teacher(seats.teacher)
            chain = setup.chain(stages)

            def train_step(plan: StepPlan) -> TrainedStep:
                samples, calls = chain.begin(plan)
                return setup.step(setup.actor.train(samples, plan), *calls)

            setup.run_loop(train_step, {"actor": setup.actor})
