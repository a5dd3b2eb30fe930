"""PPO with four models: actor, critic, reference, and a reward that is a rule, a judge or a model.

Each is a worker group of its own, placed as the recipe says. A step reads top to bottom in `train_step`: calls return
at once, and each stage waits only for the samples it is about to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from rill.algorithms import Algorithm, Need
from rill.config import Config
from rill.telemetry.run import Run
from rill.training.value import ValueTrainer
from rill.workflows.assembly import RLConfig, RLSetup, open_cluster
from rill.workflows.jobs import StepPlan, TrainedStep
from rill.workflows.loop import Observer
from rill.workflows.sections import Seats, as_table
from rill.workflows.stage_chain import Stage
from rill.workflows.stages import CriticWorker


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: Seats = "all"
    actor: Seats = "all"
    critic: Seats = "all"
    reference: Seats = "all"
    reward: Seats = "all"
    """Used only with a [reward_model]; a rule or a judge is scored where the answers are made."""
    teacher: Seats = "all"
    """Used only for distillation on the advantage."""
    inference: Seats | None = None
    """Recomputes the policy's log-probabilities. Unset: the actor does it itself."""


class PPOWorkflow:
    class Config(RLConfig):
        workflow: Literal["ppo"] = "ppo"
        critic: ValueTrainer.Config
        """The value function. Its model is the recipe's unless it names its own."""
        placement: PlacementConfig = Field(default_factory=PlacementConfig)

        handed_down = {**RLConfig.handed_down, "critic.model": "model"}

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
        config, seats = self.config, self.config.placement
        with open_cluster(config.cluster, self.folder) as cluster:
            setup = RLSetup(config, self.folder, cluster, self.observers)
            setup.launch_policy(seats.rollout, seats.actor, seats.inference)
            critic = setup.launch(
                CriticWorker,
                "critic",
                seats.critic,
                config=config.critic.model_copy(update={"model": setup.initial_model()}),
                algorithm=config.algorithm,
            )
            stages: dict[str, Stage] = {}
            if config.reward_model is not None:
                stages["rewarded"] = setup.launch_reward(seats.reward)
            own = setup.actor.score
            stages["scored"] = own if seats.inference is None else setup.launch_inference(seats.inference)
            stages["referenced"] = setup.launch_reference(seats.reference)
            if Need.TEACHER_LOGPROBS in Algorithm(config.algorithm).needs:
                stages["taught"] = setup.launch_teacher(seats.teacher)
            chain = setup.chain(stages)
            judged, for_critic = setup.channel("judged"), setup.channel("for_critic")

            def train_step(plan: StepPlan) -> TrainedStep:
                samples, calls = chain.begin(plan)
                judge = critic.judge(samples, judged, for_critic, plan)
                train = setup.actor.train(judged, plan)
                return setup.step(train, *calls, judge, critic.train(for_critic, plan))

            setup.run_loop(train_step, {"actor": setup.actor, "critic": critic})
