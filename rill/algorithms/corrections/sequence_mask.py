"""Refuse whole sequences whose divergence between μ and π_old is out of bounds.

x_t = log π_old − log μ over the trained tokens of the sequence.

    k1 = x        k2 = x²/2        k3 = e^x − 1 − x        abs = |x|
    sum, mean or max over the sequence; dropped unless low ≤ statistic ≤ high
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rill.algorithms.base import TokenBatch
from rill.algorithms.corrections.base import Correction, CorrectionWeights, masking
from rill.algorithms.mismatch import log_ratio
from rill.algorithms.segments import seq_max, seq_mean, seq_sum
from rill.config.base import PartConfig

Estimator = Literal["k1", "k2", "k3", "abs"]
Reduction = Literal["sum", "mean", "max"]


class SequenceMask(Correction):
    class Config(PartConfig):
        type: Literal["sequence_mask"] = "sequence_mask"
        estimator: Estimator = "k3"
        """What a token's x counts for; see above."""
        reduction: Reduction = "mean"
        """How tokens make the sequence's statistic."""
        low: float = Field(-float("inf"), allow_inf_nan=True)
        """Nats. Only k1 can be negative. −inf: off."""
        high: float = Field(0.01, allow_inf_nan=True)
        """Nats. inf: off."""
        renormalise: bool = True
        """Take dropped sequences out of the aggregation's denominator too."""

        @model_validator(mode="after")
        def _is_a_range(self) -> SequenceMask.Config:
            if not self.low < self.high:
                raise ValueError(f"low {self.low} must be below high {self.high}")
            return self

    config: Config

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        statistic_S = sequence_divergence(batch, self.config.estimator, self.config.reduction)
        keep_S = (statistic_S >= self.config.low) & (statistic_S <= self.config.high)
        weights_N = keep_S.to(batch.mask_N.dtype)[batch.seq_N]
        return masking(weights_N, batch.mask_N, renormalise=self.config.renormalise)


def sequence_divergence(batch: TokenBatch, estimator: Estimator, reduction: Reduction) -> Tensor:
    """The statistic of the table above for each sequence; 0 for one without trained tokens."""
    x_N = log_ratio(batch.old_logprobs_N, batch.rollout_logprobs_N).detach() * batch.mask_N
    value_N = {
        "k1": lambda: x_N,
        "k2": lambda: x_N.square() / 2,
        "k3": lambda: x_N.exp() - 1 - x_N,
        "abs": lambda: x_N.abs(),
    }[estimator]()
    if reduction == "sum":
        return seq_sum(value_N * batch.mask_N, batch.seq_N, batch.num_seqs)
    if reduction == "mean":
        return seq_mean(value_N, batch.mask_N, batch.seq_N, batch.num_seqs)
    lowest = torch.full_like(value_N, -float("inf"))
    largest_S = seq_max(
        torch.where(batch.mask_N > 0, value_N, lowest), batch.seq_N, batch.num_seqs, empty=-float("inf")
    )
    return torch.where(largest_S == -float("inf"), torch.zeros_like(largest_S), largest_S)
