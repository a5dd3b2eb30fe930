"""KTO (arXiv 2402.01306): answers that are desirable or not, each by itself; losses loom larger than gains."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from rill.algorithms.base import LossSum, Metric
from rill.algorithms.checks import require_finite
from rill.algorithms.preferences.base import PreferenceBatch, PreferenceLoss
from rill.config.base import PartConfig


class KTO(PreferenceLoss):
    needs_pairs = False
    needs_kl = True

    class Config(PartConfig):
        type: Literal["kto"] = "kto"
        beta: float = Field(0.1, gt=0)
        """Strength of the tie to the reference."""
        desirable_weight: float = Field(1.0, gt=0)
        """λ_D: of desirable answers. Keep λ_D · (desirable) between 1 and 4/3 of λ_U · (undesirable)."""
        undesirable_weight: float = Field(1.0, gt=0)
        """λ_U: of undesirable answers."""

    config: Config

    def __call__(self, batch: PreferenceBatch) -> LossSum:
        """λ_D (1 − σ(β(r − z))) for desirable answers, λ_U (1 − σ(β(z − r))) for others; r = log π/π_ref, z the KL."""
        batch.lengths()
        ratio_S = batch.log_ratio()
        require_finite({"log-ratios": ratio_S})
        gain_S = self.config.beta * (ratio_S - batch.kl)
        good_S = batch.is_good_S
        value_S = torch.where(
            good_S,
            self.config.desirable_weight * torch.sigmoid(-gain_S),
            self.config.undesirable_weight * torch.sigmoid(gain_S),
        )
        reward_S, ones_S = self.config.beta * ratio_S, torch.ones_like(value_S)
        good, bad = good_S.to(value_S.dtype), (~good_S).to(value_S.dtype)
        return LossSum(
            numerator=value_S.sum(),
            denominator=ones_S.sum(),
            metrics={
                "dpo/loss": Metric.mean(value_S, ones_S),
                "dpo/kl": Metric.mean(batch.kl * ones_S, ones_S),
                "dpo/reward_chosen": Metric.mean(reward_S, good),
                "dpo/reward_rejected": Metric.mean(reward_S, bad),
            },
        )
