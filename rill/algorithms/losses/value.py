"""The critic's loss: squared error to the returns, clipped around the values that the returns were made with."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rill.config.base import Config


class ValueConfig(Config):
    clip: float | None = Field(0.2, gt=0)
    """How far a value may move from its old one before its gradient stops. None: off."""
    coefficient: float = Field(1.0, ge=0)
    """Multiplies the loss."""


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (V_clip − R)²), V_clip = V_old + clip(V − V_old, ±ε); also which tokens are clipped."""
    plain_N = (values_N - returns_N).square()
    if clip is None:
        return plain_N / 2, torch.zeros_like(plain_N, dtype=torch.bool)
    bounded_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    clipped_N = (bounded_N - returns_N).square()
    return torch.maximum(plain_N, clipped_N) / 2, clipped_N > plain_N
