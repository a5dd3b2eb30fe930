"""PPO with four models: actor, critic, reference, and a reward that is a rule, a judge or a model.

Each is a worker group of its own, placed as the recipe says. A step reads top to bottom in `train_step`: calls return
at once, and each stage waits only for the samples it is about to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from rill.config import Config
from rill.runtime.channel import Channel
from rill.telemetry.run import Run
from rill.training.score import ScoreModel
from rill.training.value import ValueTrainer
from rill.workflows.assembly import RLConfig, RLSetup, open_cluster
from rill.workflows.jobs import StepPlan
from rill.workflows.loop import Observer
from rill.workflows.sections import Seats, as_table
from rill.workflows.stages import CriticWorker, ReferenceWorker


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: Seats = "all"
    actor: Seats = "all"
    critic: Seats = "all"
    reference: Seats = "all"
    inference: Seats | None = None
    """Recomputes the policy's log-probabilities. Unset: the actor does it itself."""


class PPOWorkflow:
    class Config(RLConfig):
        workflow: Literal["ppo"] = "ppo"
        critic: ValueTrainer.Config
        """The value function. Its model is the recipe's unless it names its own."""
        placement: PlacementConfig = Field(default_factory=PlacementConfig)

        @model_validator(mode="before")
        @classmethod
        def _critic_has_a_model(cls, values: Any) -> Any:
            if isinstance(values, dict) and "model" in values:
                critic = as_table(values.get("critic", {}))
                values = {**values, "critic": {"model": values["model"], **critic}}
            return values

    def __init__(self, config: Config, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config = self.config
        with open_cluster(config.cluster, self.folder) as cluster:
            setup = RLSetup(config, self.folder, cluster, self.observers)
            setup.launch_policy(config.placement.rollout, config.placement.actor)
            start = setup.initial_model()
            critic = setup.launch(
                CriticWorker,
                "critic",
                config.placement.critic,
                config=config.critic.model_copy(update={"model": start}),
                algorithm=config.algorithm,
            )
            reference = setup.launch(
                ReferenceWorker,
                "reference",
                config.placement.reference,
                config=ScoreModel.Config(model=start, temperature=config.trainer.temperature),
            )
            seats = config.placement.inference
            inference = setup.launch_inference(seats) if seats is not None else None
            scored, referenced, judged, for_critic = (
                Channel.create(cluster, name) for name in ("scored", "referenced", "judged", "for_critic")
            )

            def train_step(plan: StepPlan) -> Mapping[str, float]:
                stages = [
                    setup.actor.score(setup.rollouts, scored, plan)
                    if inference is None
                    else inference.score(setup.rollouts, scored, plan, setup.manifest()),
                    reference.score(scored, referenced, plan),
                    critic.judge(referenced, judged, for_critic, plan),
                    setup.actor.train(judged, plan),
                    critic.train(for_critic, plan),
                ]
                *_, policy, value = [setup.wait(stage) for stage in stages]
                return {**policy, **value}

            setup.run_loop(train_step, {"actor": setup.actor, "critic": critic})
