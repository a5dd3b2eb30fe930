"""Random numbers by row: what a row is given depends on its own seed and on what it was given before, never on others.

SplitMix64 of (seed, count), for all rows at once: a generator object to a row takes longer than a small policy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rill.types import Floats

_STEP, _FIRST, _SECOND = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Draws:
    """Axes: B row."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._keys_B = _mixed(np.array(seeds, np.uint64))
        self._device = device
        self._num_drawn = 0

    def uniform(self, *shape: int) -> Tensor:
        """[B, *shape]: 0 ≤ x < 1, 24 bits each."""
        return self._sent((self._bits(shape) >> np.uint64(40)) * 2.0**-24)

    def normal(self, *shape: int) -> Tensor:
        """[B, *shape], by Box and Muller."""
        above_0 = ((self._bits(shape) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
        angles = (self._bits(shape) >> np.uint64(11)) * (2.0**-52 * np.pi)
        return self._sent(np.sqrt(-2.0 * np.log(above_0)) * np.cos(angles))

    def integer(self, below: int) -> Tensor:
        """[B]: 0 … below − 1."""
        return (self.uniform() * below).long()

    def _bits(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
        size = int(np.prod(shape))
        counts = np.arange(self._num_drawn + 1, self._num_drawn + size + 1, dtype=np.uint64)
        self._num_drawn += size
        return _mixed(self._keys_B[:, None] + counts * _STEP).reshape(len(self._keys_B), *shape)

    def _sent(self, numbers: npt.NDArray[np.floating[Any]]) -> Tensor:
        found: Floats = numbers.astype(np.float32)
        return torch.from_numpy(found).to(self._device)


def _mixed(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    keys = (keys ^ (keys >> np.uint64(30))) * _FIRST
    keys = (keys ^ (keys >> np.uint64(27))) * _SECOND
    return keys ^ (keys >> np.uint64(31))
