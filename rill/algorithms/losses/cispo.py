"""CISPO (MiniMax-M1, arXiv 2506.13585): clip the weight, never the token; every token keeps a gradient."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class CISPO(PolicyLoss):
    class Config(PartConfig):
        type: Literal["cispo"] = "cispo"
        clip_low: float = Field(1.0, ge=0, le=1)
        """The weight is at least 1 − this. 1: no lower bound, as in the paper."""
        clip_high: float = Field(4.0, ge=0)
        """The weight is at most 1 + this."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L = −sg[clip(r, 1 − ε_low, 1 + ε_high)] · A · log π."""
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        ratio_N = log_ratio_N.detach().exp()
        weight_N = ratio_N.clamp(1.0 - self.config.clip_low, 1.0 + self.config.clip_high)
        return TokenLoss(
            loss_N=-weight_N * batch.advantages_N * batch.logprobs_N,
            metrics=ratio_metrics(log_ratio_N, weight_N != ratio_N, batch.mask_N),
        )
