"""ReMax (arXiv 2310.10505): the reward of the greedy answer is the baseline."""

from __future__ import annotations

from typing import Literal

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.algorithms.base import Need
from rill.config.base import PartConfig


class ReMax(GroupAdvantage):
    min_samples = 1
    needs = frozenset({Need.GREEDY_BASELINE})

    class Config(PartConfig):
        type: Literal["remax"] = "remax"

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        """A_i = R_i − R_greedy."""
        assert greedy_reward is not None
        return rewards_G - greedy_reward
