"""A large object between nodes: chunks of its buffers, copied once at the end that receives them.

Chunks travel in the clear, so what describes one is a fixed struct and not a pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

CHUNK_BYTES = 4 * 1024 * 1024
_PLACE = struct.Struct("<IQ")


def pack_place(index: int, offset: int) -> bytes:
    """Which buffer a chunk belongs to, and where in it."""
    return _PLACE.pack(index, offset)


def unpack_place(data: bytes) -> tuple[int, int]:
    index, offset = _PLACE.unpack(data)
    return index, offset


def send_chunks(buffers: Sequence[memoryview], post: Callable[[int, int, memoryview], None]) -> None:
    """Post every chunk as (index of its buffer, offset, bytes)."""
    for index, buffer in enumerate(buffers):
        flat = buffer.cast("B")
        for offset in range(0, flat.nbytes, CHUNK_BYTES):
            post(index, offset, flat[offset : offset + CHUNK_BYTES])


class Incoming:
    """An object on its way in."""

    def __init__(self, meta: tuple[Any, ...], header: bytes, sizes: Sequence[int]) -> None:
        import numpy as np  # only processes that stream need it

        self.meta = meta
        self.header = header
        self.buffers = [np.empty(size, np.uint8).data for size in sizes]
        self._missing_bytes = sum(sizes)

    @property
    def is_complete(self) -> bool:
        return self._missing_bytes == 0

    def take(self, index: int, offset: int, chunk: memoryview) -> None:
        self.buffers[index][offset : offset + chunk.nbytes] = chunk.cast("B")
        self._missing_bytes -= chunk.nbytes
