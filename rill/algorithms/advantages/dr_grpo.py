"""Dr.GRPO (arXiv 2503.20783): rewards centred within the group, not divided."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.config.base import PartConfig


class DrGRPO(GroupAdvantage):
    class Config(PartConfig):
        type: Literal["dr_grpo"] = "dr_grpo"

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        return centre(rewards_G)


def centre(rewards_G: Scores) -> Scores:
    """A_i = R_i − mean R; a group of one has mean 0. Equal rewards give exact zeros."""
    if rewards_G.size == 1:
        return rewards_G.copy()
    if rewards_G.max() == rewards_G.min():
        return np.zeros_like(rewards_G)
    return rewards_G - float(rewards_G.mean())
