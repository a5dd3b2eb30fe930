"""The load that several benchmarks share: one question, one answer, and a response length drawn from a long tail.

Random weights end their answers at random, so a benchmark that wants realistic lengths has to set them. `LongTail`
draws the length of every sample from a log-normal distribution, by the sample's id alone: the same run asks for the
same tokens on every machine, at any lag.

answer_tokens = 0   the whole response has the drawn length and is trained on; its reward is a coin (for step times).
answer_tokens > 0   an ordinary answer is sampled and scored first; then a tail of the drawn length follows, which costs
                    sampling and training time like any other token but stays out of the loss (for learning curves).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
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

LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class LongTail:
    class Config(PartConfig):
        type: str
        median_tokens: int = Field(384, ge=1)
        sigma: float = Field(0.7, ge=0)
        """Spread of the logarithm of the length. 0: every response has the median length."""
        max_tokens: int = Field(1024, ge=1)
        warmup_groups: int = Field(0, ge=0)
        """The first so many groups get responses of `warmup_tokens`: a cheap first step that compiles everything."""
        warmup_tokens: int = Field(32, ge=1)
        answer_tokens: int = Field(0, ge=0)
        """Longest answer before the tail. 0: the whole response is the tail."""
        reward: Annotated[PartConfig, OneOf(REWARDS)] = Field(
            default={"type": "exact", "answer": "last_number"}, validate_default=True
        )
        """Scores the answer; unused where answer_tokens is 0."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.encoder = PromptEncoder(tokenizer)
        self.rewards = RewardRunner(config.reward, ScoringConfig())

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        config = self.config
        token_ids = self.encoder.encode(prompt)
        episode = TrajectoryBuilder(prompt, token_ids, trajectory_id=trajectory_id, group_id=group_id)
        length = min(sampling.max_new_tokens, self.length_of(trajectory_id, group_id))
        if config.answer_tokens == 0:
            completion = await policy.generate(
                token_ids, replace(sampling, max_new_tokens=length, ignore_eos=True)
            )
            episode.add_sampled(completion)
            return replace(episode.finish(), reward=float(_number(trajectory_id + "reward") % 2))
        answer = await policy.generate(
            token_ids, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, config.answer_tokens))
        )
        episode.add_sampled(answer, self.encoder.decode(answer.token_ids))
        scored = await self.rewards.score(prompt, episode.finish())
        tail = await policy.generate(
            episode.token_ids, replace(sampling, max_new_tokens=length, ignore_eos=True)
        )
        episode.add_sampled(tail, trained=False)
        return replace(
            episode.finish(answer.stop_reason), reward=scored.reward, reward_parts=scored.reward_parts
        )

    def length_of(self, trajectory_id: str, group_id: str) -> int:
        config = self.config
        if group_id[:1] == "g" and group_id[1:].isdigit() and int(group_id[1:]) < config.warmup_groups:
            return config.warmup_tokens
        normal = np.random.default_rng(_number(trajectory_id)).standard_normal()
        return max(1, min(config.max_tokens, round(config.median_tokens * math.exp(config.sigma * normal))))

    def close(self) -> None:
        self.rewards.close()


def random_question(index: int, seed: int) -> dict[str, Any]:
    """For the dataset "generated": a question of 100 to 200 random characters."""
    rng = np.random.default_rng((seed, index))
    letters = rng.integers(0, len(LETTERS), rng.integers(100, 201))
    return {"question": "".join(LETTERS[i] for i in letters), "answer": "0"}


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
