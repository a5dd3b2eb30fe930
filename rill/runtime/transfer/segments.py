"""The files behind the payload store: their names, their sizes, who deletes them, and how a place in one is named.

A segment is a file in the session's shared-memory folder, named "<owner identity>.<n>", mapped by its owner and by
whoever reads it. Files outlive their owner because payloads must: they are deleted by the owner when its pool shrinks,
by the hub (or a node's store server) when the owner is dead and nothing refers to them, and with the session's folder.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

ALIGNMENT = 64
"""The header and every buffer begin at a multiple of this inside their slot."""
FULL_WAIT_S = 600.0
"""How long a full shared memory is waited for where nothing else is said."""
SLAB_BYTES = 4 * 1024 * 1024
LARGEST_SLAB_SLOT = 1024 * 1024
_SMALLEST_SLOT = 8 * 1024


def aligned(num_bytes: int) -> int:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a payload lies, and what travels in its place: its header, then its buffers, in one slot of a segment."""

    node_id: str
    owner: str
    """The identity of the process that wrote it and owns the memory."""
    segment: str
    offset: int
    """Of the slot in the segment; segment and offset name the slot."""
    header_bytes: int
    sizes: tuple[int, ...]

    @property
    def slot(self) -> tuple[str, int]:
        """What `Store.free` takes."""
        return self.segment, self.offset

    @property
    def num_bytes(self) -> int:
        """Of the whole payload as it lies in its slot."""
        return aligned(self.header_bytes) + sum(map(aligned, self.sizes))


def slot_size(num_bytes: int) -> int:
    """The size class: four steps to each power of two, so at most a fifth is wasted, in whole pages."""
    if num_bytes <= _SMALLEST_SLOT:
        return _SMALLEST_SLOT
    step = max(4096, 1 << (num_bytes - 1).bit_length() >> 3)
    return (num_bytes + step - 1) // step * step


class Segment:
    """A mapped file. The mapping lives as long as anything looks at it, whatever happens to the file.

    The store's payloads and the weights of the shm transport lie in segments.
    """

    __slots__ = ("map", "name", "num_bytes", "slot_bytes")

    def __init__(self, path: Path, num_bytes: int, slot_bytes: int = 0, *, create: bool) -> None:
        self.name = path.name
        self.slot_bytes = slot_bytes
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:  # all of it now: a full /dev/shm would be a fatal signal at the first write later
                os.posix_fallocate(fd, 0, num_bytes)
            self.num_bytes = os.fstat(fd).st_size
            # Populated at once: a page fault per 4 KiB costs more than the copy into it.
            self.map = mmap.mmap(fd, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            if create:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def discard(self, path: Path) -> None:
        """Its owner needs it no more and nobody looks at it: give the memory back now, though others have it mapped."""
        with contextlib.suppress(OSError):  # a file system that cannot do it
            self.map.madvise(mmap.MADV_REMOVE)
        path.unlink(missing_ok=True)


def owner_of(name: str) -> str:
    """The identity of the process that made a segment."""
    return name.rpartition(".")[0]


def unlink(shm_dir: Path, owner: str, kept: Sequence[str]) -> None:
    """Delete the segments of a dead process, but for some."""
    for path in list(shm_dir.iterdir()) if shm_dir.exists() else ():
        if owner_of(path.name) == owner and path.name not in kept:
            path.unlink(missing_ok=True)
