"""What came after a turn, against the episodes of the group as a whole.

    A_{i,k} = G_{i,k} − mean over the other episodes j of G_{j,1},    G_{i,k} = Σ_{l≥k} γ^(l−k) r_{i,l}

A turn is not credited with what was given before it, and the baseline knows nothing of what the episode itself did:
the gradient has no bias, unlike that of a baseline by the number of the turn, which only episodes have that got so far.
Where all of the reward comes at the end, it is RLOO.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, TokenAdvantage
from rill.algorithms.advantages.group_statistics import minus_others_mean, of_first_sequence
from rill.algorithms.base import Reduce
from rill.algorithms.turns import turns_of
from rill.config.base import PartConfig


class ReturnToGo(TokenAdvantage):
    scope = Scope.GROUP
    min_samples = 2

    class Config(PartConfig):
        type: Literal["return_to_go"] = "return_to_go"
        gamma: float = Field(1.0, ge=0, le=1)
        """Discount per turn."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        turns = turns_of(batch, rewards_N)
        returns_T = turns.returns(self.config.gamma)
        is_first_T = torch.ones_like(turns.seq_T, dtype=torch.bool)
        is_first_T[1:] = turns.seq_T[1:] != turns.seq_T[:-1]
        whole_S = batch.rewards_S.double().index_put((turns.seq_T[is_first_T],), returns_T[is_first_T])
        whole_S = of_first_sequence(batch, whole_S)
        baseline_S = whole_S - minus_others_mean(batch, whole_S)
        return Advantages(advantages_N=turns.spread(returns_T - baseline_S[turns.seq_T], rewards_N))
