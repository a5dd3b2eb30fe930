"""DPPO (arXiv 2602.04879): a trust region on the probability's divergence, not on the ratio.

A ratio bound is loose for likely tokens and strict for rare ones. DPPO looks at the two-outcome distribution
"this token or any other" and masks the tokens that have left the region in the direction the update pushes.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class DPPO(PolicyLoss):
    class Config(PartConfig):
        type: Literal["dppo"] = "dppo"
        divergence: Literal["tv", "kl"] = "tv"
        """tv: |π − π_old|. kl: the binary KL(π_old ∥ π), in nats."""
        limit_low: float = Field(0.15, gt=0)
        """Divergence at which tokens with A ≤ 0 stop being pushed down."""
        limit_high: float = Field(0.15, gt=0)
        """Divergence at which tokens with A > 0 stop being pushed up."""
        max_ratio: float = Field(20.0, gt=1)
        """The ratio is cut off here; large, because truncation biases."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L = −m · sg[min(r, c)] · A · log π, m the mask of tokens inside the region."""
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        inside_N = trust_region(
            batch.logprobs_N.detach(),
            batch.old_logprobs_N,
            batch.advantages_N,
            divergence=self.config.divergence,
            low=self.config.limit_low,
            high=self.config.limit_high,
        )
        weight_N = log_ratio_N.detach().exp().clamp(max=self.config.max_ratio) * inside_N
        return TokenLoss(
            loss_N=-weight_N * batch.advantages_N * batch.logprobs_N,
            metrics=ratio_metrics(log_ratio_N, ~inside_N, batch.mask_N),
        )


def trust_region(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    low: float,
    high: float,
) -> Tensor:
    """True where the token may still be pushed: its divergence is within the limit, or the push leads back.

    p = π(a), q = π_old(a). tv: |p − q|. kl: q log(q/p) + (1 − q) log((1 − q)/(1 − p)).
    """
    p_N, q_N = logprobs_N.exp(), old_logprobs_N.exp()
    if divergence == "tv":
        distance_N = (p_N - q_N).abs()
    else:
        rest_N = ((1.0 - q_N).clamp(min=1e-8) / (1.0 - p_N).clamp(min=1e-8)).log()
        distance_N = q_N * log_ratio(old_logprobs_N, logprobs_N) + (1.0 - q_N) * rest_N
    may_rise_N = (distance_N <= high) | (p_N <= q_N)
    may_fall_N = (distance_N <= low) | (p_N >= q_N)
    return torch.where(advantages_N > 0, may_rise_N, may_fall_N)
