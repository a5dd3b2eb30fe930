"""Where a payload lies: the small record that travels in its place, through channels, calls and sends.

On the wire it is an array; `Ref.of` reads what a decoder without types made of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

ALIGNMENT = 64
"""The header and every buffer begin at a multiple of this inside their slot."""


def aligned(num_bytes: int) -> int:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One payload in a node's store: its header, then its buffers, in one slot of a segment."""

    node_id: str
    owner: str
    """The identity of the process that wrote it and owns the memory."""
    segment: str
    offset: int
    """Of the slot in the segment; segment and offset name the slot."""
    header_bytes: int
    sizes: tuple[int, ...]
    """Bytes of each buffer."""

    @staticmethod
    def of(raw: Any) -> Ref:
        """From the array that it was on the wire."""
        return raw if type(raw) is Ref else msgspec.convert(raw, Ref)

    @property
    def slot(self) -> tuple[str, int]:
        """What `Store.free` takes."""
        return self.segment, self.offset

    @property
    def num_bytes(self) -> int:
        """Of the whole payload as it lies in its slot."""
        return aligned(self.header_bytes) + sum(map(aligned, self.sizes))
