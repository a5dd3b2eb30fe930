"""Decoupled PPO (arXiv 2110.00641; AReaL arXiv 2505.24298): clip around a recent policy, weigh by the sampling one.

Three policies: μ sampled (perhaps versions ago), π_prox anchors the trust region, π learns. With stale samples
a clip around μ would pull back to an old policy; around π_prox it does not.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import Metric, Need, TokenBatch, TokenLoss
from rill.algorithms.checks import required
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.losses.clip import clip_loss
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class Decoupled(PolicyLoss):
    uses_rollout_ratio = True

    class Config(PartConfig):
        type: Literal["decoupled"] = "decoupled"
        clip_low: float = Field(0.2, ge=0, lt=1)
        """ε_low around π_prox."""
        clip_high: float = Field(0.2, ge=0)
        """ε_high around π_prox."""
        dual_clip: float | None = Field(None, gt=1)
        """See the clip loss. None: off."""
        weight_cap: float = Field(5.0, gt=0)
        """Bound of w = π_prox/μ."""
        over_cap: Literal["clamp", "mask"] = "mask"
        """What happens to tokens with w over the cap: w = cap, or dropped."""
        proximal: Literal["recompute", "approximate"] = "recompute"
        """recompute: π_prox is π_old, one more forward pass where a batch has several optimizer steps.
        approximate: interpolated from μ and π by the token's lag, no pass (AReaL's log-linear form)."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.proximal == "approximate":
            self.needs = frozenset({Need.LAG})

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L = w · −min(r·A, clip(r)·A), r = π/π_prox, w = sg[π_prox/μ]."""
        prox_N = self._proximal(batch)
        log_ratio_N = log_ratio(batch.logprobs_N, prox_N)
        loss_N, clipped_N = clip_loss(
            log_ratio_N.exp(),
            batch.advantages_N,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            dual_clip=self.config.dual_clip,
        )
        weight_N = log_ratio(prox_N, batch.rollout_logprobs_N).exp()
        over_N = weight_N > self.config.weight_cap
        fallback = self.config.weight_cap if self.config.over_cap == "clamp" else 0.0
        weight_N = torch.where(over_N, torch.full_like(weight_N, fallback), weight_N)
        metrics = ratio_metrics(log_ratio_N, clipped_N, batch.mask_N)
        metrics["policy/behaviour_weight"] = Metric.mean(weight_N, batch.mask_N)
        metrics["policy/behaviour_over_cap"] = Metric.mean(over_N.to(weight_N.dtype), batch.mask_N)
        return TokenLoss(loss_N=weight_N * loss_N, metrics=metrics)

    def _proximal(self, batch: TokenBatch) -> Tensor:
        if self.config.proximal == "recompute":
            return batch.old_logprobs_N
        return approximate_proximal(batch.logprobs_N, batch.rollout_logprobs_N, required(batch, "lag_N"))


def approximate_proximal(logprobs_N: Tensor, rollout_logprobs_N: Tensor, lag_N: Tensor) -> Tensor:
    """log π_prox ≈ log μ + α (log π − log μ), α = (v_prox − v_μ)/(v_π − v_μ) = d/(d + 1). Carries no gradient.

    d is the token's lag: v_prox is the version that the step starts from, v_π = v_prox + 1 the one it makes. A
    fresh token (d = 0) was sampled by π_prox itself, so α = 0.
    """
    lag_N = lag_N.clamp(min=0)
    alpha_N = lag_N / (lag_N + 1.0)
    return (rollout_logprobs_N + alpha_N * (logprobs_N - rollout_logprobs_N)).detach()
