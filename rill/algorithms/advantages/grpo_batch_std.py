"""Group mean, batch deviation (arXiv 2508.08221, "Lite PPO"): centred within the group, scaled over the batch.

A group of almost equal rewards is not blown up to the size of one that is divided.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, TokenAdvantage
from rill.algorithms.advantages.group_statistics import episode_weights, minus_group_mean
from rill.algorithms.base import Reduce
from rill.algorithms.whitening import moments
from rill.config.base import PartConfig


class GRPOBatchStd(TokenAdvantage):
    min_samples = 2

    class Config(PartConfig):
        type: Literal["grpo_batch_std"] = "grpo_batch_std"
        epsilon: float = Field(1e-6, ge=0)
        """Added to the standard deviation."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A_i = (R_i − mean of i's group) / (unbiased std of R over all episodes of all ranks + ε)."""
        centred_S = minus_group_mean(batch, batch.rewards_S)
        _, variance = moments(batch.rewards_S, episode_weights(batch), reduce)
        scaled_S = centred_S / (variance.sqrt() + self.config.epsilon).to(centred_S)
        return Advantages(advantages_N=scaled_S[batch.seq_N] * batch.mask_N)
