"""Masked importance sampling (IcePop, MIS): a weight outside [lo, hi] drops the token or its sequence.

Where truncation still trains on a token that μ and π_old disagree about, masking refuses it.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rill.algorithms.corrections.importance import ImportanceConfig, ImportanceSampling


class MaskedIS(ImportanceSampling):
    class Config(ImportanceConfig):
        type: Literal["mis"] = "mis"
        low: float | None = Field(None, ge=0)
        """Weights below become 0. None: 0.5 for tokens, 0 for sequences, whose product of ratios is far from 1 by its
        length alone."""
        high: float = Field(2.0, gt=0)
        """Weights above become 0."""
        weigh: bool = True
        """Multiply kept tokens by w; False: by 1, masking only."""
        renormalise: bool = False
        """Take dropped tokens out of the aggregation's denominator too."""

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

    def bounded(self, weights_N: Tensor) -> Tensor:
        """w where lo ≤ w ≤ hi, else 0."""
        is_inside_N = (weights_N >= self.config.lowest) & (weights_N <= self.config.high)
        value_N = weights_N if self.config.weigh else torch.ones_like(weights_N)
        return torch.where(is_inside_N, value_N, torch.zeros_like(weights_N))

    def kept(self, weights_N: Tensor) -> Tensor | None:
        return (weights_N != 0).to(weights_N.dtype) if self.config.renormalise else None
