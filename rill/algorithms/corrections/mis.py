"""Masked importance sampling (IcePop, MIS): a weight outside [lo, hi] drops the token or its sequence.

Where truncation still trains on a token that μ and π_old disagree about, masking refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rill.algorithms.base import Reduce, TokenBatch
from rill.algorithms.corrections.base import (
    Correction,
    CorrectionWeights,
    Level,
    Policy,
    importance_weights,
    weight_metrics,
    weight_needs,
)
from rill.algorithms.corrections.tis import batch_mean_weight, counts, mean_weight
from rill.config.base import PartConfig


class MaskedIS(Correction):
    class Config(PartConfig):
        type: Literal["mis"] = "mis"
        policy: Policy = "old"
        """Whose probability stands over μ's; see corrections.base."""
        level: Level = "token"
        """token: IcePop. sequence: the product of the sequence's ratios decides for all its tokens."""
        low: float | None = Field(None, ge=0)
        """Weights below become 0. None: 0.5 for tokens, 0 for sequences, whose product of ratios is far from 1 by its
        length alone."""
        high: float = Field(2.0, gt=0)
        """Weights above become 0."""
        weigh: bool = True
        """Multiply kept tokens by w; False: by 1, masking only."""
        renormalise: bool = False
        """Take dropped tokens out of the aggregation's denominator too."""
        normalise: bool = False
        """Divide by the mean weight of the batch's tokens (or sequences)."""

        @model_validator(mode="after")
        def _is_a_range(self) -> MaskedIS.Config:
            if not self.lowest < self.high:
                raise ValueError(f"low {self.lowest} must be below high {self.high}")
            return self

        @property
        def lowest(self) -> float:
            return self.low if self.low is not None else 0.5 if self.level == "token" else 0.0

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bounds = (config.lowest, config.high)
        self.uses_rollout_ratio = config.weigh
        self.needs = weight_needs(config.policy, normalise=config.normalise)

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        weights_N = self.masked(batch)
        kept_N = (weights_N != 0).to(weights_N.dtype) if self.config.renormalise else None
        if self.config.normalise:
            weights_N = weights_N / mean_weight(batch, weights_N, self.config.level)
        return CorrectionWeights(
            weights_N=weights_N, kept_N=kept_N, metrics=weight_metrics(weights_N, batch.mask_N)
        )

    def masked(self, batch: TokenBatch) -> Tensor:
        """w where lo ≤ w ≤ hi, else 0."""
        raw_N = importance_weights(batch, self.config.level, self.config.policy)
        is_inside_N = (raw_N >= self.config.lowest) & (raw_N <= self.config.high)
        value_N = raw_N if self.config.weigh else torch.ones_like(raw_N)
        return torch.where(is_inside_N, value_N, torch.zeros_like(raw_N))

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        if not self.config.normalise:
            return {}
        parts = [(self.masked(batch), counts(batch, self.config.level)) for batch in batches]
        return batch_mean_weight(parts, reduce)
