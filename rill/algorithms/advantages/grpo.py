"""GRPO (arXiv 2402.03300): rewards standardised within the group."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.config.base import PartConfig


class GRPO(GroupAdvantage):
    class Config(PartConfig):
        type: Literal["grpo"] = "grpo"
        epsilon: float = Field(1e-6, ge=0)
        """Added to the standard deviation."""

    config: Config

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        return standardise(rewards_G, self.config.epsilon)


def standardise(rewards_G: Scores, epsilon: float) -> Scores:
    """A_i = (R_i − mean R) / (std R + ε), unbiased std; a group of one has mean 0 and std 1, so A = R / (1 + ε).

    Equal rewards give exact zeros, not the rounding error of the mean over ε.
    """
    if rewards_G.size == 1:
        return rewards_G / (1.0 + epsilon)
    if rewards_G.max() == rewards_G.min():
        return np.zeros_like(rewards_G)
    return (rewards_G - float(rewards_G.mean())) / (float(rewards_G.std(ddof=1)) + epsilon)
