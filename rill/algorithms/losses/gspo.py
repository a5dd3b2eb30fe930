"""GSPO (arXiv 2507.18071): the ratio of the whole sequence, length-normalised, clipped as one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.losses.clip import clip_loss
from rill.algorithms.mismatch import log_ratio
from rill.algorithms.segments import seq_mean
from rill.config.base import PartConfig


class GSPO(PolicyLoss):
    class Config(PartConfig):
        type: Literal["gspo"] = "gspo"
        clip_low: float = Field(3e-4, ge=0, lt=1)
        """ε_low of the sequence ratio; its scale is far below a token ratio's."""
        clip_high: float = Field(4e-4, ge=0)
        """ε_high of the sequence ratio."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        ratio_N = sequence_ratio(log_ratio_N, batch)
        loss_N, clipped_N = clip_loss(
            ratio_N, batch.advantages_N, clip_low=self.config.clip_low, clip_high=self.config.clip_high
        )
        return TokenLoss(loss_N=loss_N, metrics=ratio_metrics(log_ratio_N, clipped_N, batch.mask_N))


def sequence_ratio(log_ratio_N: Tensor, batch: TokenBatch) -> Tensor:
    """s_{i,t} = sg[s_i] · π_t / sg[π_t], s_i = exp( mean_t (log π − log π_old) ).

    The value is the sequence's, the gradient each token's own, so that per-token advantages stay meaningful.
    Averaged over the tokens of a sequence it is the gradient of s_i itself.
    """
    log_s_S = seq_mean(log_ratio_N.detach(), batch.mask_N, batch.seq_N, batch.num_seqs)
    return (log_s_S[batch.seq_N] + batch.logprobs_N - batch.logprobs_N.detach()).exp()
