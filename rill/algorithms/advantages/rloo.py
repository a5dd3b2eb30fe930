"""RLOO (arXiv 2402.14740): each sample against the mean of the others."""

from __future__ import annotations

from typing import Literal

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.algorithms.advantages.dr_grpo import centre
from rill.config.base import PartConfig


class RLOO(GroupAdvantage):
    class Config(PartConfig):
        type: Literal["rloo"] = "rloo"

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        return leave_one_out(rewards_G)


def leave_one_out(rewards_G: Scores) -> Scores:
    """A_i = R_i − Σ_{j≠i} R_j / (G − 1) = G/(G − 1) · (R_i − mean R); a group of one has no others: A = R."""
    size = rewards_G.size
    return rewards_G.copy() if size == 1 else centre(rewards_G) * (size / (size - 1))
