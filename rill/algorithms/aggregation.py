"""How per-token losses become one number, in a form that does not depend on how the batch was split.

A mode gives each token a weight and the micro-batch a denominator; both add up over micro-batches and ranks:

    loss = Σ weights_N · loss_N  /  divisor(Σ denominator)

m_t mask, L_s = Σ_{t∈s} m_t trained tokens of sequence s. A sequence without trained tokens counts nowhere.

    mode                       weight       denominator
    token-mean                 m_t          Σ_t m_t
    token-sum                  m_t          none (divide by 1)
    seq-mean-token-sum         m_t          number of sequences
    seq-mean-token-mean        m_t / L_s    number of sequences
    seq-mean-token-sum-norm    m_t / C      number of sequences
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from rill.algorithms.segments import seq_sum
from rill.errors import TrainingError


class Aggregation(StrEnum):
    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"


def token_weights(
    mode: Aggregation, mask_N: Tensor, seq_N: Tensor, num_seqs: int, *, constant: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(weights_N, denominator) of the table above; `constant` is C of seq-mean-token-sum-norm."""
    if mode is Aggregation.TOKEN_MEAN:
        return mask_N, mask_N.sum()
    if mode is Aggregation.TOKEN_SUM:
        return mask_N, torch.zeros_like(mask_N.sum())
    lengths_S = seq_sum(mask_N, seq_N, num_seqs)
    denominator = (lengths_S > 0).sum().to(mask_N.dtype)
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        return mask_N, denominator
    if mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return mask_N / lengths_S.clamp(min=1)[seq_N], denominator
    if constant <= 0:
        raise TrainingError(
            f"{mode} divides by a constant > 0, got {constant}: set algorithm.aggregation_constant"
        )
    return mask_N / constant, denominator
