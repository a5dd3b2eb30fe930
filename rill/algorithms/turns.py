"""The turns of a flat batch: stretches of trained tokens of one sequence with one turn id.

N token, M trained token, T turn, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch
from rill.algorithms.checks import required
from rill.algorithms.segments import discounted_tail, seq_sum


@dataclass(frozen=True, kw_only=True)
class Turns:
    index_M: Tensor
    """Where the trained tokens lie among all."""
    turn_M: Tensor
    seq_T: Tensor
    rewards_T: Tensor
    """float64: what was given within the turn."""

    def first_token(self) -> Tensor:
        """Index among all tokens of the first trained token of each turn."""
        starts_M = torch.ones_like(self.turn_M, dtype=torch.bool)
        starts_M[1:] = self.turn_M[1:] != self.turn_M[:-1]
        return self.index_M[starts_M]

    def returns(self, gamma: float) -> Tensor:
        """G_k = Σ_{j≥k} γ^(j−k) r_j within the turn's sequence."""
        return discounted_tail(self.rewards_T, self.seq_T, gamma)

    def spread(self, values_T: Tensor, like_N: Tensor) -> Tensor:
        """Each turn's value on its trained tokens, 0 elsewhere."""
        return torch.zeros_like(like_N).index_put((self.index_M,), values_T.to(like_N)[self.turn_M])


def turns_of(batch: AdvantageBatch, rewards_N: Tensor) -> Turns:
    index_M = torch.nonzero(batch.mask_N > 0).squeeze(1)
    seq_M, id_M = batch.seq_N[index_M], required(batch, "turn_N")[index_M]
    starts_M = torch.ones_like(seq_M, dtype=torch.bool)
    starts_M[1:] = (seq_M[1:] != seq_M[:-1]) | (id_M[1:] != id_M[:-1])
    turn_M = starts_M.cumsum(0) - 1
    seq_T = seq_M[starts_M]
    rewards_T = seq_sum(rewards_N[index_M], turn_M, len(seq_T)).double()
    return Turns(index_M=index_M, turn_M=turn_M, seq_T=seq_T, rewards_T=rewards_T)
