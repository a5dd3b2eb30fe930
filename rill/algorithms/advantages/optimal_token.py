"""Optimal token baselines (OTB, arXiv 2602.07078): a baseline of its own for every position of a group.

The variance of the gradient is least with B_t = E[W_t G_t] / E[W_t], W_t the squared norm of the score up to t.
Its proxy needs a forward pass only: in the logits, ‖∇ log π(a)‖² = 1 − 2π(a) + Σ_v π(v)².
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, TokenAdvantage
from rill.algorithms.advantages.group_statistics import sum_over
from rill.algorithms.base import Need, Reduce
from rill.algorithms.checks import required
from rill.algorithms.segments import discounted_tail, seq_sum
from rill.config.base import PartConfig

_EPSILON = 1e-8


class OptimalToken(TokenAdvantage):
    needs = frozenset({Need.REWARD_LOGPROBS, Need.ENERGIES})
    scope = Scope.GROUP
    min_samples = 2

    class Config(PartConfig):
        type: Literal["optimal_token"] = "optimal_token"

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A_t = G_t − Σ_i W_t^i G_t^i / Σ_i W_t^i over the samples of the group that have a t-th trained token;
        G_t the reward from t on, W_t = Σ_{u≤t} (1 − 2π_u + Σπ_u²). A group of one has baseline 0."""
        index_M = torch.nonzero(batch.mask_N > 0).squeeze(1)  # M trained token
        seq_M = batch.seq_N[index_M]
        energies_M = required(batch, "energies_N")[index_M].double()
        returns_M = discounted_tail(rewards_N[index_M].double(), seq_M, 1.0)
        total_M = discounted_tail(energies_M, seq_M, 1.0)  # from t on; the rest of the sum lies before it
        sums_S = seq_sum(energies_M, seq_M, batch.num_seqs)
        weights_M = sums_S[seq_M] - total_M + energies_M
        lengths_S = torch.bincount(seq_M, minlength=batch.num_seqs)
        first_S = lengths_S.cumsum(0) - lengths_S
        place_M = torch.arange(len(seq_M), device=seq_M.device) - first_S[seq_M]
        group_S = required(batch, "group_S")
        keys = torch.stack([group_S[seq_M], place_M], dim=1)
        _, cell_M = torch.unique(keys, dim=0, return_inverse=True)
        count = int(cell_M.max()) + 1 if cell_M.numel() else 0
        baseline_C = seq_sum(weights_M * returns_M, cell_M, count) / (
            seq_sum(weights_M, cell_M, count) + _EPSILON
        )
        is_alone_S = sum_over(group_S, torch.ones_like(group_S)) == 1
        baseline_M = torch.where(is_alone_S[seq_M], 0.0, baseline_C[cell_M])
        found_M = (returns_M - baseline_M).to(rewards_N)
        return Advantages(advantages_N=torch.zeros_like(rewards_N).index_put((index_M,), found_M))


@torch.no_grad()
def squared_probabilities(
    hidden_KD: Tensor, head_VD: Tensor, *, temperature: float, chunk_tokens: int = 1024
) -> Tensor:
    """Σ_v π(v)² at each position, from its last hidden state and the head; logits live for one chunk."""
    found = [
        torch.softmax((chunk_CD @ head_VD.T).float() / temperature, dim=-1).square().sum(-1)
        for chunk_CD in torch.split(hidden_KD, chunk_tokens)
    ]
    return torch.cat(found) if found else hidden_KD.new_zeros(0, dtype=torch.float32)
