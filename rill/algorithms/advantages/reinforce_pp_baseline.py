"""REINFORCE++-baseline (arXiv 2501.03262): minus the group's mean, then whitened over the whole batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, BatchAdvantage
from rill.algorithms.base import Reduce
from rill.algorithms.checks import required
from rill.algorithms.segments import seq_sum
from rill.algorithms.whitening import whiten
from rill.config.base import PartConfig


class ReinforcePPBaseline(BatchAdvantage):
    class Config(PartConfig):
        type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    def __init__(self, config: Config) -> None:
        self.config = config

    def batch(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A_t = whiten(R_i − mean of i's group), the same on every trained token of i."""
        centred_S = minus_group_mean(batch.rewards_S, required(batch, "group_S"))
        return Advantages(advantages_N=whiten(centred_S[batch.seq_N] * batch.mask_N, batch.mask_N, reduce))


def minus_group_mean(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """R_i − mean of its group; a group of one has mean 0."""
    _, number_S = torch.unique(group_S, return_inverse=True)
    count = int(number_S.max()) + 1 if number_S.numel() else 0
    size_S = seq_sum(torch.ones_like(rewards_S), number_S, count)[number_S]
    mean_S = seq_sum(rewards_S, number_S, count)[number_S] / size_S
    return torch.where(size_S > 1, rewards_S - mean_S, rewards_S)
