"""Advantages that raise the best of k samples rather than the average sample. Three published forms:

best      only the best sample is pushed, by its lead over the second best (arXiv 2503.19595)
max       unbiased gradient of E[max of k], leave-one-out baseline, any reward (PKPO, arXiv 2505.15201)
training  closed form of Pass@k Training, rewards 0 or 1 (arXiv 2508.10751)
"""

from __future__ import annotations

from math import comb, sqrt
from typing import Literal

import numpy as np
from pydantic import Field

from rill.algorithms.advantages.base import GroupAdvantage, Scores
from rill.config.base import PartConfig
from rill.errors import InvalidSampleError


class PassAtK(GroupAdvantage):
    class Config(PartConfig):
        type: Literal["pass_at_k"] = "pass_at_k"
        form: Literal["best", "max", "training"] = "max"
        """See above."""
        k: int = Field(4, ge=2)
        """Attempts that count together; at most the group size. Unused by form 'best'."""
        epsilon: float = Field(1e-6, ge=0)
        """Added to the standard deviation (form 'best')."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.min_samples = 2 if config.form == "best" else config.k

    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        if rewards_G.size < self.min_samples:
            raise InvalidSampleError(
                f"pass_at_k ({self.config.form}) needs groups of at least {self.min_samples} samples, got "
                f"{rewards_G.size}"
            )
        if self.config.form == "best":
            return best_lead(rewards_G, self.config.epsilon)
        if self.config.form == "max":
            return max_at_k(rewards_G, self.config.k)
        return pass_at_k_training(rewards_G, self.config.k)


def best_lead(rewards_G: Scores, epsilon: float) -> Scores:
    """A_best = (R_(1) − R_(2)) / (std R + ε), all others 0; a tie for the best gives zeros."""
    advantages_G = np.zeros_like(rewards_G)
    order = np.argsort(-rewards_G, kind="stable")
    lead = float(rewards_G[order[0]] - rewards_G[order[1]])
    if lead > 0:
        advantages_G[order[0]] = lead / (float(rewards_G.std(ddof=1)) + epsilon)
    return advantages_G


def max_at_k(rewards_G: Scores, k: int) -> Scores:
    """A_i = Σ over k-subsets I ∋ i of (max_I R − max_{I∖i} R) / C(G, k).

    Only subsets in which i is the largest count. In ascending order, with i at place p (from 0):
    A_i = [ C(p, k−1) R_i − Σ_{m<p} C(m, k−2) R_m ] / C(G, k).
    """
    size = rewards_G.size
    order = np.argsort(rewards_G, kind="stable")
    ascending = rewards_G[order]
    advantages_G = np.zeros_like(rewards_G)
    total, below = comb(size, k), 0.0
    for place in range(size):
        value = float(ascending[place])
        advantages_G[order[place]] = (comb(place, k - 1) * value - below) / total
        below += comb(place, k - 2) * value
    return advantages_G


def pass_at_k_training(rewards_G: Scores, k: int) -> Scores:
    """R̄ = 1 − C(n⁻, k)/C(G, k), σ = √(R̄(1 − R̄)); for right samples A = (1 − R̄)/σ, for wrong ones
    A = (1 − R̄ − C(n⁻−1, k−1)/C(G−1, k−1))/σ; n⁻ wrong samples. σ = 0 (too few or too many wrong) gives zeros.
    """
    if not np.isin(rewards_G, (0.0, 1.0)).all():
        raise InvalidSampleError(
            f"pass_at_k form 'training' is defined for rewards 0 and 1, got {rewards_G.tolist()}: use form 'max'"
        )
    size, wrong = rewards_G.size, int((rewards_G == 0).sum())
    failure = comb(wrong, k) / comb(size, k)
    deviation = sqrt(failure * (1.0 - failure))
    if deviation == 0.0:
        return np.zeros_like(rewards_G)
    of_wrong = failure - comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    return np.where(rewards_G == 1.0, failure, of_wrong) / deviation
