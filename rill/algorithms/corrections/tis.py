"""Truncated importance sampling: the weight π_old/μ, cut off above.

Truncation bounds the variance that a few far-off tokens would bring, at the price of a bias towards μ.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rill.algorithms.corrections.importance import ImportanceConfig, ImportanceSampling


class TruncatedIS(ImportanceSampling):
    uses_rollout_ratio = True

    class Config(ImportanceConfig):
        type: Literal["tis"] = "tis"
        high: float = Field(2.0, gt=0)
        """Weights above are cut to this."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bounds = (1.0 / config.high, config.high)

    def bounded(self, weights_N: Tensor) -> Tensor:
        """min(w, hi)."""
        return weights_N.clamp(max=self.config.high)
