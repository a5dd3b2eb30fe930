"""What a policy loss is: one term per token from log-probabilities and advantages, before any aggregation.

N token, S sequence. Inputs arrive sanitised (rill.algorithms.algorithm): float32 or float64, masked tokens 0,
so that a loss may exponentiate without looking at the mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from rill.algorithms.base import LossPart, Metric, TokenBatch, TokenLoss


class PolicyLoss(LossPart, ABC):
    @abstractmethod
    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """The loss of each token and what is worth knowing about it."""


def ratio_metrics(log_ratio_N: Tensor, clipped_N: Tensor, mask_N: Tensor) -> dict[str, Metric]:
    """policy/kl: KL(π_old ∥ π) ≈ mean of e^x − 1 − x, x = log π − log π_old; policy/clipped: share of tokens."""
    x_N = log_ratio_N.detach()
    ratio_N = x_N.exp()
    return {
        "policy/ratio": Metric.mean(ratio_N, mask_N),
        "policy/ratio_max": Metric.largest(ratio_N * mask_N),
        "policy/kl": Metric.mean(ratio_N - 1 - x_N, mask_N),
        "policy/clipped": Metric.mean(clipped_N.to(x_N.dtype), mask_N),
    }
