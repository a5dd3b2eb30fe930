"""Small arrays from the host to the device, many in one copy and without waiting for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.int32]


def aligned(num_words: int) -> int:
    """Triton compiles a kernel again for every pattern of aligned and unaligned pointers: all are aligned."""
    return -(-num_words // 32) * 32


class Upload:
    def __init__(self, num_words: int, device: torch.device, num_staging: int) -> None:
        """num_staging: pinned buffers, used in turn; as many as are ever under way at one time."""
        self._device = device
        self._staging = [
            torch.empty(num_words, dtype=torch.int32, pin_memory=True) for _ in range(num_staging)
        ]
        self._views = [t.numpy() for t in self._staging]
        self._turn = 0

    def __call__(self, arrays: list[Array]) -> list[torch.Tensor]:
        """int32 tensors on the device, views of one fresh buffer."""
        starts, at = [], 0
        for array in arrays:
            starts.append(at)
            at += aligned(len(array))
        into = torch.empty(at, dtype=torch.int32, device=self._device)
        view = self.stage()
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + len(array)] = array
        self.send(at, into)
        return [into[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]

    def stage(self) -> Array:
        """The next staging buffer, to be written and sent. What it holds is undefined."""
        self._turn = (self._turn + 1) % len(self._staging)
        return self._views[self._turn]

    def send(self, num_words: int, into: torch.Tensor) -> None:
        """The first words of the buffer that stage() gave last."""
        into[:num_words].copy_(self._staging[self._turn][:num_words], non_blocking=True)
