"""A reward of length alone, in sampled tokens, meant as a term of a mix: 1 up to `free_tokens`, then down in a straight
line to 0 at `max_tokens`. DAPO's punishment of over-long answers is algorithm.filters.overlong."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rill.envs.rewards.base import Isolation, RewardConfig
from rill.types import Prompt, Trajectory


class LengthReward:
    """1 − length / max_tokens, not below 0: 1 for an empty answer."""

    class Config(RewardConfig):
        type: Literal["length"] = "length"
        max_tokens: int = Field(ge=1)
        """Sampled tokens at which the value has come down to 0."""
        free_tokens: int = Field(default=0, ge=0)
        """Up to so many tokens the value is 1. 0: it falls from the first."""

        @model_validator(mode="after")
        def _in_order(self) -> LengthReward.Config:
            if self.free_tokens >= self.max_tokens:
                raise ValueError(
                    f"`free_tokens` ({self.free_tokens}) must lie below `max_tokens` ({self.max_tokens})"
                )
            return self

    isolation = Isolation.INLINE

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        over = max(0, trajectory.num_sampled - self.config.free_tokens)
        return max(0.0, 1.0 - over / (self.config.max_tokens - self.config.free_tokens))
