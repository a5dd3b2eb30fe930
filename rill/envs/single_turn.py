"""One question, one answer, one reward: encode → generate → score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rill.config import OneOf, PartConfig
from rill.data.chat import PromptEncoder
from rill.envs.base import Policy
from rill.envs.rewards.base import REWARDS
from rill.envs.rewards.runner import RewardRunner, ScoringConfig
from rill.envs.trajectory_builder import TrajectoryBuilder
from rill.types import Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SingleTurn:
    class Config(PartConfig):
        type: Literal["single_turn"] = "single_turn"
        reward: Annotated[PartConfig, OneOf(REWARDS)] = Field(
            default={"type": "exact"}, validate_default=True
        )
        """How an answer is scored."""
        scoring: ScoringConfig = ScoringConfig()
        """Deadlines and what a failed reward is worth."""
        template_arguments: dict[str, Any] = {}
        """Passed to the chat template, e.g. enable_thinking = false. Empty: none."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.encoder = PromptEncoder(tokenizer, template_arguments=config.template_arguments)
        self.rewards = RewardRunner(config.reward, config.scoring)

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        token_ids = self.encoder.encode(prompt)
        episode = TrajectoryBuilder(prompt, token_ids, trajectory_id=trajectory_id, group_id=group_id)
        completion = await policy.generate(token_ids, sampling)
        episode.add_sampled(completion, self.encoder.decode(completion.token_ids))
        return await self.rewards.score(prompt, episode.finish())

    def close(self) -> None:
        self.rewards.close()
