"""KL-Cov (arXiv 2505.22617): no clip; the tokens of largest covariance pay for leaving the old policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import Metric, Need, Reduce, TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.losses.covariance import (
    NUM_TOKENS,
    largest_threshold,
    mean_statistics,
    token_covariance,
)
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig

THRESHOLD = "covariance/threshold"


class KLCov(PolicyLoss):
    needs = frozenset({Need.OLD_LOGPROBS, Need.STATISTICS})

    class Config(PartConfig):
        type: Literal["kl_cov"] = "kl_cov"
        share: float = Field(2e-4, gt=0, le=1)
        """Share of the batch's trained tokens that is penalised; at least one token is."""
        coefficient: float = Field(1.0, ge=0)
        """Of |log π − log π_old| on those tokens."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L = −r·A, plus β·|log π − log π_old| on the `share` of tokens with the largest covariance."""
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        chosen_N = self.chosen(batch).to(batch.mask_N.dtype)
        loss_N = -log_ratio_N.exp() * batch.advantages_N
        loss_N = loss_N + self.config.coefficient * log_ratio_N.abs() * chosen_N
        metrics = ratio_metrics(log_ratio_N, torch.zeros_like(chosen_N), batch.mask_N)
        metrics["policy/penalised"] = Metric.mean(chosen_N, batch.mask_N)
        return TokenLoss(loss_N=loss_N, metrics=metrics)

    def chosen(self, batch: TokenBatch) -> Tensor:
        figures = self.figures(batch)
        return (token_covariance(batch, figures) >= figures[THRESHOLD]) & (batch.mask_N > 0)

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        figures = mean_statistics(batches, reduce)
        wanted = (self.config.share * figures[NUM_TOKENS]).floor().clamp(min=1)
        wanted = torch.minimum(wanted, figures[NUM_TOKENS])
        covs = [token_covariance(batch, figures) for batch in batches]
        threshold = largest_threshold(covs, [batch.mask_N for batch in batches], wanted, reduce)
        return {**figures, THRESHOLD: threshold}
