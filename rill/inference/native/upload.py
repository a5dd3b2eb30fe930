"""Small arrays from the host to the device, many in one copy and without waiting for it."""

from __future__ import annotations

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
        self._rings = [_Ring(num_usual, num_staging), _Ring(max(num_words, num_usual), NUM_LARGE)]
        self._ring = self._rings[0]

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
        self._ring = next(ring for ring in self._rings if ring.num_words >= num_words)
        return self._ring.next_view()

    def send(self, num_words: int, into: torch.Tensor) -> None:
        """The first words of the buffer that stage() gave last."""
        into[:num_words].copy_(self._ring.buffer[:num_words], non_blocking=True)


class _Ring:
    def __init__(self, num_words: int, count: int) -> None:
        self.num_words = num_words
        self._buffers = [torch.empty(num_words, dtype=torch.int32, pin_memory=True) for _ in range(count)]
        self._views = [t.numpy() for t in self._buffers]
        self._turn = 0

    @property
    def buffer(self) -> torch.Tensor:
        return self._buffers[self._turn]

    def next_view(self) -> Array:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._views[self._turn]
