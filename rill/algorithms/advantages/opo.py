"""OPO (arXiv 2505.23585): the variance-optimal baseline, which under on-policy sampling weighs by length."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.config.base import PartConfig
from rill.errors import InvalidSampleError


class OPO(GroupAdvantage):
    reads_lengths = True

    class Config(PartConfig):
        type: Literal["opo"] = "opo"

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        return length_weighted(rewards_G, lengths_G)


def length_weighted(rewards_G: Scores, lengths_G: Scores) -> Scores:
    """A_i = R_i − Σ_j L_j R_j / Σ_j L_j, L trained tokens; a group of one has baseline 0.

    The squared norm of a sample's score function grows with its length, so L stands for it.
    """
    if rewards_G.size == 1:
        return rewards_G.copy()
    if rewards_G.max() == rewards_G.min():
        return np.zeros_like(rewards_G)
    total = float(lengths_G.sum())
    if total <= 0:
        raise InvalidSampleError("OPO weighs by length and every sample of the group has length 0")
    return rewards_G - float((lengths_G * rewards_G).sum()) / total
