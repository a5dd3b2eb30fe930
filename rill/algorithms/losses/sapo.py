"""SAPO (arXiv 2511.20347): a sigmoid gate on the ratio in place of the clip."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class SAPO(PolicyLoss):
    class Config(PartConfig):
        type: Literal["sapo"] = "sapo"
        tau_positive: float = Field(1.0, gt=0)
        """τ for A > 0: how fast the gradient fades as the ratio leaves 1."""
        tau_negative: float = Field(1.05, gt=0)
        """τ for A ≤ 0; larger, since pushing a token down lifts all others."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        gate_N = soft_gate(
            log_ratio_N.exp(), batch.advantages_N, self.config.tau_positive, self.config.tau_negative
        )
        nothing_N = torch.zeros_like(batch.mask_N)
        metrics = ratio_metrics(log_ratio_N, nothing_N, batch.mask_N)
        return TokenLoss(loss_N=-gate_N * batch.advantages_N, metrics=metrics)


def soft_gate(ratio_N: Tensor, advantages_N: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """f(r) = (4/τ) · σ(τ (r − 1)), τ by the sign of A; f'(1) = 1, so that on-policy it is REINFORCE."""
    tau_N = torch.full_like(ratio_N, tau_negative).masked_fill(advantages_N > 0, tau_positive)
    return torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N
