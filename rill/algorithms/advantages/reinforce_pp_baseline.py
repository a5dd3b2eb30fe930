"""REINFORCE++-baseline (arXiv 2501.03262): minus the group's mean, then whitened over the whole batch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, TokenAdvantage
from rill.algorithms.advantages.group_statistics import minus_group_mean
from rill.algorithms.base import Reduce
from rill.algorithms.whitening import whiten
from rill.config.base import PartConfig


class ReinforcePPBaseline(TokenAdvantage):
    min_samples = 2

    class Config(PartConfig):
        type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A_t = whiten(R_i − mean of i's group), the same on every trained token of i."""
        centred_S = minus_group_mean(batch, batch.rewards_S)
        return Advantages(advantages_N=whiten(centred_S[batch.seq_N] * batch.mask_N, batch.mask_N, reduce))
