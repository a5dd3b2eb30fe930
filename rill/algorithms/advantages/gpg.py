"""GPG (arXiv 2504.02546): centred rewards, scaled up for the groups that teach nothing.

Groups of equal rewards have no gradient and still count in the batch's mean; α makes up for them.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, TokenAdvantage
from rill.algorithms.advantages.group_statistics import episode_weights, minus_group_mean
from rill.algorithms.base import Metric, Reduce
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
        teaches_S = self._teaches(batch, centred_S)
        counts = reduce(torch.stack([weights_S.sum(), (weights_S * teaches_S).sum()]).double())
        alpha = counts[0] / counts[1].clamp(min=1)
        advantages_S = (alpha / self.config.scale).to(centred_S) * centred_S
        return Advantages(
            advantages_N=advantages_S[batch.seq_N] * batch.mask_N,
            metrics={"advantages/alpha": Metric(total=alpha, weight=torch.ones_like(alpha))},
        )

    @staticmethod
    def _teaches(batch: AdvantageBatch, centred_S: Tensor) -> Tensor:
        """1.0 where some reward of the sequence's group differs from the others."""
        assert batch.group_S is not None
        _, number_S = torch.unique(batch.group_S, return_inverse=True)
        count = int(number_S.max()) + 1 if number_S.numel() else 0
        largest = torch.zeros(count, dtype=centred_S.dtype, device=centred_S.device)
        largest = largest.scatter_reduce(0, number_S, centred_S.abs(), reduce="amax", include_self=True)
        return (largest > 0).to(centred_S)[number_S]
