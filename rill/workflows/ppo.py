"""PPO: the step of GRPO with a critic between the samples and the actor.

The critic adds its values, and the advantages that follow from them, to every sample on its way, and learns from the
same samples. Each model is a worker group of its own, placed as the recipe says.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rill.algorithms import Need
from rill.training.value import ValueTrainer
from rill.workers.learners import CriticWorker
from rill.workflows.config import Seats
from rill.workflows.flow import Flow
from rill.workflows.grpo import GRPO, finish_group
from rill.workflows.language import initial_model, launch_actor, launch_rollout
from rill.workflows.launch import Launcher
from rill.workflows.rl_config import ModelPlacementConfig, RLConfig


class PPOPlacementConfig(ModelPlacementConfig):
    critic: Seats = "all"


class PPO(GRPO):
    class Config(RLConfig):
        workflow: Literal["ppo"] = "ppo"
        critic: ValueTrainer.Config
        """The value function. Its model is the recipe's unless it names its own, and what is too long for the trainer
        is for it."""
        placement: PPOPlacementConfig = Field(default_factory=PPOPlacementConfig)

        handed_down = {
            **RLConfig.handed_down,
            "critic.model": "model",
            "critic.micro_batch_tokens": "trainer.micro_batch_tokens",
            "critic.on_too_long": "trainer.on_too_long",
        }
        provides: ClassVar[frozenset[Need]] = RLConfig.provides | {Need.VALUES}

    config: Config

    def groups(self, launch: Launcher) -> None:
        config = self.config
        self.rollout = launch_rollout(launch, config, finish_group)
        self.actor = launch_actor(launch, config, self.rollout, has_critic=True)
        critic = config.critic
        if critic.model == config.model:
            critic = critic.model_copy(update={"model": initial_model(launch, config, self.actor)})
        self.critic = launch(
            CriticWorker, "critic", is_trained=True, config=critic, algorithm=config.algorithm
        )
        self.scorers(launch)

    def step(self, flow: Flow) -> None:
        answers = flow.sample(self.rollout)
        batch = self.scored(flow, flow.select(answers))
        judged = flow.through(self.critic, batch, "train")  # values, advantages; the critic's own step
        flow.update(self.actor, judged)
