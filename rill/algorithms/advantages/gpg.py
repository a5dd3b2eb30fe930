"""GPG (arXiv 2504.02546): centred rewards, scaled up for the groups that teach nothing.

Groups of equal rewards have no gradient and still count in the batch's mean; α makes up for them.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, TokenAdvantage
from rill.algorithms.advantages.group_statistics import episode_weights, minus_group_mean, sum_over
from rill.algorithms.base import Metric, Reduce
from rill.algorithms.checks import required
from rill.config.base import PartConfig


class GPG(TokenAdvantage):
    min_samples = 2

    class Config(PartConfig):
        type: Literal["gpg"] = "gpg"
        scale: float = Field(1.0, gt=0)
        """F_norm: divides the advantages."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A_i = α (R_i − mean of i's group) / F_norm, α = episodes / (episodes of groups whose rewards differ)."""
        centred_S = minus_group_mean(batch, batch.rewards_S)
        weights_S = episode_weights(batch)
        differs_S = sum_over(required(batch, "group_S"), centred_S.abs()) > 0
        counts = reduce(torch.stack([weights_S.sum(), (weights_S * differs_S).sum()]).double())
        alpha = counts[0] / counts[1].clamp(min=1)
        advantages_S = (alpha / self.config.scale).to(centred_S) * centred_S
        return Advantages(
            advantages_N=advantages_S[batch.seq_N] * batch.mask_N,
            metrics={"advantages/alpha": Metric(total=alpha, weight=torch.ones_like(alpha))},
        )
