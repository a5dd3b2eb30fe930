"""Truncated importance sampling: the weight π_old/μ, cut off above.

Truncation bounds the variance that a few far-off tokens would bring, at the price of a bias towards μ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from rill.algorithms.base import Reduce, TokenBatch
from rill.algorithms.corrections.base import (
    Correction,
    CorrectionWeights,
    Level,
    Policy,
    importance_weights,
    weight_metrics,
    weight_needs,
)
from rill.algorithms.segments import seq_sum
from rill.config.base import PartConfig

MEAN_WEIGHT = "correction/mean_weight"


class TruncatedIS(Correction):
    uses_rollout_ratio = True

    class Config(PartConfig):
        type: Literal["tis"] = "tis"
        policy: Policy = "old"
        """Whose probability stands over μ's; see corrections.base."""
        level: Level = "token"
        """token: each token's own ratio. sequence: the product over the sequence, on each of its tokens."""
        high: float = Field(2.0, gt=0)
        """Weights above are cut to this."""
        normalise: bool = False
        """Divide by the mean weight of the batch's tokens (or sequences): truncation does not shrink the step then."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bounds = (1.0 / config.high, config.high)
        self.needs = weight_needs(config.policy, normalise=config.normalise)

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        weights_N = self.truncated(batch)
        if self.config.normalise:
            weights_N = weights_N / mean_weight(batch, weights_N, self.config.level)
        return CorrectionWeights(weights_N=weights_N, metrics=weight_metrics(weights_N, batch.mask_N))

    def truncated(self, batch: TokenBatch) -> Tensor:
        """min(w, hi)."""
        return importance_weights(batch, self.config.level, self.config.policy).clamp(max=self.config.high)

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        if not self.config.normalise:
            return {}
        parts = [(self.truncated(batch), counts(batch, self.config.level)) for batch in batches]
        return batch_mean_weight(parts, reduce)


def counts(batch: TokenBatch, level: Level) -> Tensor:
    """What each token counts in a mean of weights: 1, or 1 / (its sequence's tokens) where the weight is the
    sequence's, which then counts once however long it is."""
    if level == "token":
        return batch.mask_N
    lengths_S = seq_sum(batch.mask_N, batch.seq_N, batch.num_seqs)
    return batch.mask_N / lengths_S.clamp(min=1)[batch.seq_N]


def batch_mean_weight(parts: Sequence[tuple[Tensor, Tensor]], reduce: Reduce) -> dict[str, Tensor]:
    """Mean of the weights over the trained tokens, or sequences, of all micro-batches and ranks."""
    total = reduce(sum((w_N * count_N).sum() for w_N, count_N in parts))  # type: ignore[arg-type]
    count = reduce(sum(count_N.sum() for _, count_N in parts))  # type: ignore[arg-type]
    return {MEAN_WEIGHT: total / count.clamp(min=1)}


def mean_weight(batch: TokenBatch, weights_N: Tensor, level: Level) -> Tensor:
    """The batch's mean weight, or the micro-batch's own where no statistics were given."""
    if MEAN_WEIGHT in batch.statistics:
        mean = batch.statistics[MEAN_WEIGHT]
    else:
        count_N = counts(batch, level)
        mean = (weights_N * count_N).sum() / count_N.sum().clamp(min=1)
    return mean.clamp(min=1e-8)
