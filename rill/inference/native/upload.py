"""Small arrays from the host to the device, many in one copy and without waiting for it."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.int32]

NUM_LARGE = 6


def aligned(num_words: int) -> int:
    """Triton compiles a kernel again for every pattern of aligned and unaligned pointers: all are aligned."""
    return -(-num_words // 32) * 32


class Upload:
    """Writes into pinned buffers that are used in turn: one is written again when its copy is long done."""

    def __init__(self, num_words: int, num_usual: int, device: torch.device, num_staging: int) -> None:
        """num_staging buffers of num_usual words, as many as are ever under way at one time, and a few of num_words for
        what is larger: prompts and whole block tables, at most two in a turn of the host."""
        self._device = device
        sizes = [(num_usual, num_staging), (max(num_words, num_usual), NUM_LARGE)]
        self._rings = [(words, cycle([_pinned(words) for _ in range(count)])) for words, count in sizes]
        self._staged = next(self._rings[0][1])

    def __call__(self, arrays: list[Array]) -> list[torch.Tensor]:
        """int32 tensors on the device, views of one fresh buffer."""
        starts, at = [], 0
        for array in arrays:
            starts.append(at)
            at += aligned(len(array))
        into = torch.empty(at, dtype=torch.int32, device=self._device)
        view = self.stage(at)
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + len(array)] = array
        self.send(at, into)
        return [into[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]

    def stage(self, num_words: int) -> Array:
        """The next staging buffer for so many words, to be written and sent. What it holds is undefined."""
        self._staged = next(next(ring for words, ring in self._rings if words >= num_words))
        return self._staged[1]

    def send(self, num_words: int, into: torch.Tensor) -> None:
        """The first words of the buffer that stage() gave last."""
        into[:num_words].copy_(self._staged[0][:num_words], non_blocking=True)


def _pinned(num_words: int) -> tuple[torch.Tensor, Array]:
    buffer = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
    return buffer, buffer.numpy()
