"""The clipped surrogate of PPO (arXiv 1707.06347), also GRPO's; asymmetric (DAPO) and with a dual clip."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class Clip(PolicyLoss):
    class Config(PartConfig):
        type: Literal["clip"] = "clip"
        clip_low: float = Field(0.2, ge=0, lt=1)
        """ε_low: the ratio is clipped below 1 − ε_low."""
        clip_high: float = Field(0.2, ge=0)
        """ε_high: the ratio is clipped above 1 + ε_high."""
        dual_clip: float | None = Field(None, gt=1)
        """c: for A < 0 the term is at most −c·A. None: off."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        loss_N, clipped_N = clip_loss(
            log_ratio_N.exp(),
            batch.advantages_N,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            dual_clip=self.config.dual_clip,
        )
        return TokenLoss(loss_N=loss_N, metrics=ratio_metrics(log_ratio_N, clipped_N, batch.mask_N))


def clip_loss(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """L = −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A); with a dual clip c, for A < 0: L = min(L, −c·A).

    Also returns which tokens are clipped, i.e. have no gradient.
    """
    plain_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        is_over_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(is_over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | is_over_N
    return loss_N, clipped_N
