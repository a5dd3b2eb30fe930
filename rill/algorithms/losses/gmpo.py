"""GMPO (arXiv 2507.20673): the geometric mean of the token ratios, each clipped in log space."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.algorithms.segments import seq_mean
from rill.config.base import PartConfig


class GMPO(PolicyLoss):
    class Config(PartConfig):
        type: Literal["gmpo"] = "gmpo"
        clip_low: float = Field(0.4, ge=0)
        """Log-ratios are clipped below −this, in nats; the paper's (e^−0.4, e^0.4)."""
        clip_high: float = Field(0.4, ge=0)
        """Log-ratios are clipped above this, in nats."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L_i = −A_i · exp( mean_t c_t ), on every token of i, so that a sequence mean gives it back.

        A_i is the sequence's mean advantage; c_t the one-sided clip of log r_t on A_i's side.
        """
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        advantage_S = seq_mean(batch.advantages_N, batch.mask_N, batch.seq_N, batch.num_seqs)
        clipped_log_N = one_sided_clip(
            log_ratio_N, advantage_S[batch.seq_N], self.config.clip_low, self.config.clip_high
        )
        mean_S = seq_mean(clipped_log_N, batch.mask_N, batch.seq_N, batch.num_seqs)
        loss_S = -advantage_S * mean_S.exp()
        metrics = ratio_metrics(log_ratio_N, clipped_log_N != log_ratio_N, batch.mask_N)
        return TokenLoss(loss_N=loss_S[batch.seq_N], metrics=metrics)


def one_sided_clip(log_ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """min(log r, ε_high) where A ≥ 0, max(log r, −ε_low) where A < 0: the side that clip-and-min leaves bounded."""
    return torch.where(advantages_N >= 0, log_ratio_N.clamp(max=high), log_ratio_N.clamp(min=-low))
