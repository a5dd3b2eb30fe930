"""DRO (arXiv 2405.19107; per token as in arXiv 2501.12599): a quadratic penalty for leaving the sampling policy.

No ratio and no clip: made for samples of any age. The penalty's gradient is β·log(π/μ), a pull back to μ.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class DRO(PolicyLoss):
    needs = frozenset()
    uses_rollout_ratio = True

    class Config(PartConfig):
        type: Literal["dro"] = "dro"
        beta: float = Field(0.05, ge=0)
        """β: the strength of the tie to the policy that sampled."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L = −A · log π + (β/2) · (log π − log μ)²."""
        x_N = batch.logprobs_N - batch.rollout_logprobs_N
        loss_N = -batch.advantages_N * batch.logprobs_N + self.config.beta / 2 * x_N.square()
        metrics = ratio_metrics(
            log_ratio(batch.logprobs_N, batch.rollout_logprobs_N), torch.zeros_like(x_N), batch.mask_N
        )
        return TokenLoss(loss_N=loss_N, metrics=metrics)
