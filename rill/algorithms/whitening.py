"""Standardising over all trained tokens of all ranks, so that every rank subtracts and divides by the same."""

from __future__ import annotations

import torch
from torch import Tensor

from rill.algorithms.base import Reduce
from rill.errors import TrainingError

_EPSILON = 1e-8
"""Added to the variance."""


def moments(values_N: Tensor, mask_N: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """(mean, unbiased variance) over trained tokens of all ranks, in two passes; one token has mean 0, variance 1.

    Without any trained token on any rank there is nothing to whiten: TrainingError.
    """
    values_N = values_N.double()
    mask_N = mask_N.double()
    count = reduce(mask_N.sum())
    if float(count) == 0:
        raise TrainingError("no trained token in the batch: nothing to whiten")
    if float(count) == 1:
        return torch.zeros_like(count), torch.ones_like(count)
    mean = reduce((values_N * mask_N).sum()) / count
    variance = reduce(((values_N - mean).square() * mask_N).sum()) / (count - 1)
    return mean, variance


def whiten(values_N: Tensor, mask_N: Tensor, reduce: Reduce) -> Tensor:
    """(v − mean) / sqrt(var + ε) on trained tokens, 0 elsewhere."""
    mean, variance = moments(values_N, mask_N, reduce)
    white_N = (values_N.double() - mean) * torch.rsqrt(variance + _EPSILON)
    return white_N.to(values_N.dtype) * mask_N
