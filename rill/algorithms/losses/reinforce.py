"""REINFORCE: no ratio, no clip. Right for one optimizer step on fresh samples."""

from __future__ import annotations

from typing import Literal

import torch

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class Reinforce(PolicyLoss):
    needs = frozenset()

    class Config(PartConfig):
        type: Literal["reinforce"] = "reinforce"

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        """L = −A · log π."""
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        nothing_N = torch.zeros_like(batch.mask_N)
        return TokenLoss(
            loss_N=-batch.advantages_N * batch.logprobs_N,
            metrics=ratio_metrics(log_ratio_N, nothing_N, batch.mask_N),
        )
