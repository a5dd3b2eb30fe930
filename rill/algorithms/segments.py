"""Sums and scans over the sequences of a flat batch.

N token, S sequence. Tokens of one sequence lie one after another, in order.

On CUDA `index_add` adds in no fixed order, so the last bits of a sequence sum may differ between runs unless
`torch.use_deterministic_algorithms(True)` is set.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seq_sum(values_N: Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """sum_S[s] = Σ over tokens of sequence s."""
    zeros_S = torch.zeros(num_seqs, dtype=values_N.dtype, device=values_N.device)
    return zeros_S.index_add(0, seq_N, values_N)


def seq_mean(values_N: Tensor, mask_N: Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """mean_S[s] = Σ_t m_t v_t / Σ_t m_t over sequence s; 0 for a sequence without trained tokens."""
    total_S = seq_sum(values_N * mask_N, seq_N, num_seqs)
    return total_S / seq_sum(mask_N, seq_N, num_seqs).clamp(min=1)


def seq_max(values_N: Tensor, seq_N: Tensor, num_seqs: int, *, empty: float) -> Tensor:
    """max_S[s] = largest value of sequence s; `empty` where a sequence has no token."""
    start_S = torch.full((num_seqs,), empty, dtype=values_N.dtype, device=values_N.device)
    return start_S.scatter_reduce(0, seq_N, values_N, reduce="amax", include_self=True)


def last_trained(mask_N: Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """index_S[s] = position in the flat batch of the last trained token of s; −1 where there is none."""
    position_N = torch.arange(seq_N.numel(), device=seq_N.device)
    candidate_N = torch.where(mask_N > 0, position_N, -1)
    start_S = torch.full((num_seqs,), -1, dtype=torch.int64, device=seq_N.device)
    return start_S.scatter_reduce(0, seq_N, candidate_N, reduce="amax", include_self=True)


def discounted_tail(values_N: Tensor, seq_N: Tensor, decay: float | Tensor) -> Tensor:
    """tail_t = Σ_{k≥0} decay^k · v_{t+k} within the sequence of t; a tensor of decays is constant within each.

    Doubling: after step j every entry holds the sum of its next 2^j terms, so the whole batch takes
    log2(longest sequence) vector operations and no padding.
    """
    tail_N = values_N.clone()
    factor, reach = decay, 1
    count = values_N.numel()
    while reach < count and (isinstance(factor, Tensor) or factor != 0.0):
        same_sequence = seq_N[reach:] == seq_N[:-reach]
        if not bool(same_sequence.any()):
            break
        ahead = torch.where(same_sequence, tail_N[reach:], torch.zeros_like(tail_N[reach:]))
        near = factor[:-reach] if isinstance(factor, Tensor) else factor
        tail_N = torch.cat([tail_N[:-reach] + near * ahead, tail_N[-reach:]])
        factor, reach = factor * factor, reach * 2
    return tail_N
