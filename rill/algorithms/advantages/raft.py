"""Rejection-sampling fine-tuning (RAFT, arXiv 2304.06767): imitate the best answers of a group, forget the others."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.config.base import PartConfig


class RAFT(GroupAdvantage):
    min_samples = 1
    drops_zeros = True

    class Config(PartConfig):
        type: Literal["raft"] = "raft"
        threshold: float = 0.5
        """Only answers with at least this reward are imitated."""
        keep_best: int = Field(0, ge=0)
        """At most so many of a group, the best first, earlier ones before later ones of the same reward. 0: all."""

    config: Config

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        """A_i = 1 where accepted; the rest is not trained on. With the reinforce loss this is supervised training."""
        accepted = np.flatnonzero(rewards_G >= self.config.threshold)
        if self.config.keep_best:
            best = accepted[np.argsort(-rewards_G[accepted], kind="stable")]
            accepted = best[: self.config.keep_best]
        advantages_G = np.zeros_like(rewards_G)
        advantages_G[accepted] = 1.0
        return advantages_G
