"""What an object's transfer says of it; large objects between nodes: chunks of buffers, copied once on arrival.

Chunks travel in the clear, so what describes one is a fixed struct and not a pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from rill.runtime.transfer.device_link import OfferOnWire

Source: TypeAlias = tuple[str, int, str]
"""Group, rank and tag."""
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


class Envelope(NamedTuple):
    """What a receiver must know of an object before it opens it."""

    group: str
    rank: int
    tag: str
    identity: str
    """The sender's."""
    reply_to: str
    """The sender's mailbox."""
    number: int
    """Of the sender's objects; the receipt names it."""
    offer: OfferOnWire | None
    """Its GPU tensors, where they come by a link of their own."""

    @property
    def source(self) -> Source:
        return self.group, self.rank, self.tag


class Incoming:
    """An object on its way in."""

    def __init__(self, envelope: Envelope, header: bytes, sizes: Sequence[int]) -> None:
        import numpy as np  # only processes that stream need it

        self.envelope = envelope
        self.header = header
        self.buffers = [np.empty(size, np.uint8).data for size in sizes]
        self._missing_bytes = sum(sizes)

    @property
    def is_complete(self) -> bool:
        return self._missing_bytes == 0

    def take(self, index: int, offset: int, chunk: memoryview) -> None:
        self.buffers[index][offset : offset + chunk.nbytes] = chunk.cast("B")
        self._missing_bytes -= chunk.nbytes
