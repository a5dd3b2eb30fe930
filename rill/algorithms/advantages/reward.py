"""The reward itself, without a baseline: for environments that make their own, and for pure distillation."""

from __future__ import annotations

from typing import Literal

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.config.base import PartConfig


class Reward(GroupAdvantage):
    min_samples = 1

    class Config(PartConfig):
        type: Literal["reward"] = "reward"
        scale: float = 1.0
        """Times the reward. 0 with distillation on the advantage: the teacher alone teaches."""

    config: Config

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        """A_i = scale · R_i."""
        return self.config.scale * rewards_G
