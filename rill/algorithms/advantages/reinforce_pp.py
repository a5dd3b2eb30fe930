"""REINFORCE++ (arXiv 2501.03262): per-token reward-to-go, whitened over the whole batch. No critic, no groups."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, TokenAdvantage
from rill.algorithms.base import Reduce
from rill.algorithms.segments import discounted_tail
from rill.algorithms.whitening import whiten
from rill.config.base import PartConfig


class ReinforcePP(TokenAdvantage):
    class Config(PartConfig):
        type: Literal["reinforce_pp"] = "reinforce_pp"
        gamma: float = Field(1.0, ge=0, le=1)
        """Discount per trained token."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A = whiten(Σ_{k≥0} γ^k r_{t+k}); the KL penalty is in r (kl.place = "reward")."""
        return Advantages(
            advantages_N=whiten(
                reward_to_go(rewards_N, batch.mask_N, batch.seq_N, self.config.gamma), batch.mask_N, reduce
            )
        )


def reward_to_go(rewards_N: Tensor, mask_N: Tensor, seq_N: Tensor, gamma: float) -> Tensor:
    """Σ_{k≥0} γ^k r_{t+k} over the trained tokens of the sequence; 0 on other tokens."""
    index_M = torch.nonzero(mask_N > 0).squeeze(1)  # M trained token
    tail_M = discounted_tail(rewards_N[index_M], seq_N[index_M], gamma)
    return torch.zeros_like(rewards_N).index_put((index_M,), tail_M)
