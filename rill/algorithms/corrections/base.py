"""What a correction is: a weight on each token's loss for having been sampled by μ and not by π_old.

w = exp(log π_old − log μ), or with π in place of π_old. Weights carry no gradient;
0 drops the token. Inputs arrive sanitised, as for losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from rill.algorithms.base import LossPart, Metric, TokenBatch


@dataclass(frozen=True, kw_only=True)
class CorrectionWeights:
    weights_N: Tensor
    """Multiplies the policy loss; detached."""
    kept_N: Tensor | None = None
    """1.0 where the token stays in the aggregation's denominator; None: all trained tokens do."""
    metrics: dict[str, Metric] = field(default_factory=dict)


class Correction(LossPart, ABC):
    bounds: tuple[float, float] = (0.5, 2.0)
    """[lo, hi] of the metric mismatch/outside."""

    @abstractmethod
    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        """The weight of each token."""


def masking(weights_N: Tensor, mask_N: Tensor, *, renormalise: bool) -> CorrectionWeights:
    """Weights of 0 and 1. `renormalise`: what is dropped leaves the aggregation's denominator too."""
    kept_N = weights_N if renormalise else None
    return CorrectionWeights(weights_N=weights_N, kept_N=kept_N, metrics=weight_metrics(weights_N, mask_N))


def weight_metrics(weights_N: Tensor, mask_N: Tensor) -> dict[str, Metric]:
    """Moments of the weights as applied (finish_metrics makes correction/ess of them) and the share dropped."""
    return {
        "correction/weight_mean": Metric.mean(weights_N, mask_N),
        "correction/weight_sq_mean": Metric.mean(weights_N.square(), mask_N),
        "correction/dropped": Metric.mean((weights_N == 0).to(mask_N.dtype), mask_N),
    }
