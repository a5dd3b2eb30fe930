"""How far the policy that sampled (μ, the engine) is from the policy that trains (π_old, the trainer).

Reported by every policy loss, whatever the correction, because a silent mismatch is the usual cause of a run
that degrades with a healthy loss curve. x_t = log π_old − log μ over trained tokens, w_t = exp(x_t).

    mismatch/abs_mean, abs_max   mean and max |x|
    mismatch/kl                  KL(μ ∥ π_old) ≈ mean −x          (tokens are samples of μ; may be negative)
    mismatch/kl_k3               KL(μ ∥ π_old) ≈ mean e^x − 1 − x (never negative)
    mismatch/outside             share of tokens with w outside [lo, hi]
    mismatch/ess                 (Σw)² / (n Σw²), 1 when μ = π_old; from `weight_mean` and `weight_sq_mean`
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rill.algorithms.base import Metric

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, here and in every loss: e^20 ≈ 5·10⁸ still squares in float32."""


def log_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """log(p/q) per token, clamped to ±MAX_LOG_RATIO."""
    return (numerator_N - denominator_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mismatch_metrics(
    old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, mask_N: Tensor, *, low: float, high: float
) -> dict[str, Metric]:
    """The table above as additive metrics; `finish_metrics` turns the two weight moments into the ESS."""
    with torch.no_grad():
        x_N = log_ratio(old_logprobs_N, rollout_logprobs_N) * mask_N
        weight_N = x_N.exp()
        outside_N = ((weight_N < low) | (weight_N > high)).to(x_N.dtype)
        return {
            "mismatch/abs_mean": Metric.mean(x_N.abs(), mask_N),
            "mismatch/abs_max": Metric.largest(x_N.abs()),
            "mismatch/kl": Metric.mean(-x_N, mask_N),
            "mismatch/kl_k3": Metric.mean(weight_N - 1 - x_N, mask_N),
            "mismatch/outside": Metric.mean(outside_N, mask_N),
            "mismatch/weight_mean": Metric.mean(weight_N, mask_N),
            "mismatch/weight_sq_mean": Metric.mean(weight_N.square(), mask_N),
        }


def effective_sample_size(weight_mean: float, weight_sq_mean: float) -> float:
    """ESS / n = (Σw)² / (n Σw²) = mean(w)² / mean(w²); 0 when every weight is 0."""
    return weight_mean * weight_mean / weight_sq_mean if weight_sq_mean > 0 else 0.0


def finish_metrics(reduced: Mapping[str, float]) -> dict[str, float]:
    """Add what no sum can carry to metrics already reduced over micro-batches and ranks.

    Every pair `X/weight_mean`, `X/weight_sq_mean` gains `X/ess`.
    """
    finished = dict(reduced)
    for name, weight_mean in reduced.items():
        prefix, _, last = name.rpartition("/")
        square = f"{prefix}/weight_sq_mean"
        if last == "weight_mean" and square in reduced:
            finished[f"{prefix}/ess"] = effective_sample_size(weight_mean, reduced[square])
    return finished
