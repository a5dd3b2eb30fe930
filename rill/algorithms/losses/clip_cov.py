"""Clip-Cov (arXiv 2505.22617): the clipped surrogate, with a few tokens of high covariance held still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import Metric, Need, Reduce, TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.losses.clip import clip_loss
from rill.algorithms.losses.covariance import (
    NUM_TOKENS,
    mean_statistics,
    token_covariance,
    token_lottery,
)
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig

NUM_IN_BAND = "covariance/num_in_band"


class ClipCov(PolicyLoss):
    needs = frozenset({Need.OLD_LOGPROBS, Need.STATISTICS})

    class Config(PartConfig):
        type: Literal["clip_cov"] = "clip_cov"
        clip_low: float = Field(0.2, ge=0, le=1)
        """ε_low. 1: no lower bound, as the authors train."""
        clip_high: float = Field(0.2, ge=0)
        """ε_high."""
        share: float = Field(2e-4, gt=0, le=1)
        """Expected share of the batch's trained tokens that is held still."""
        band_low: float = 1.0
        """Only tokens of larger covariance are candidates."""
        band_high: float = 5.0
        """Only tokens of smaller covariance are candidates."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """The clip loss; of the tokens with cov in (band_low, band_high) a random `share`·N lose their gradient."""
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        loss_N, clipped_N = clip_loss(
            log_ratio_N.exp(),
            batch.advantages_N,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        held_N = self.held(batch)
        metrics = ratio_metrics(log_ratio_N, clipped_N, batch.mask_N)
        metrics["policy/held"] = Metric.mean(held_N.to(batch.mask_N.dtype), batch.mask_N)
        return TokenLoss(loss_N=torch.where(held_N, loss_N.detach(), loss_N), metrics=metrics)

    def held(self, batch: TokenBatch) -> Tensor:
        """Each candidate is drawn with probability share · N / (number of candidates)."""
        figures = self.figures(batch)
        wanted = self.config.share * figures[NUM_TOKENS]
        probability = wanted / figures[NUM_IN_BAND].clamp(min=1)
        return self.in_band(batch, figures) & (token_lottery(batch) < probability)

    def in_band(self, batch: TokenBatch, figures: Mapping[str, Tensor]) -> Tensor:
        cov_N = token_covariance(batch, figures)
        return (cov_N > self.config.band_low) & (cov_N < self.config.band_high) & (batch.mask_N > 0)

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        figures = mean_statistics(batches, reduce)
        counts = torch.stack([self.in_band(batch, figures).sum() for batch in batches]).double()
        return {**figures, NUM_IN_BAND: reduce(counts.sum())}
