"""A node's payload store, seen from one process: shared memory, written once by producers, read in place by consumers.

    producer: encode ──copy──▶ slot of a segment        the slot's place travels as a descriptor through the broker
    consumer: map the segment (cached) ──▶ objects built on the memory itself, no copy
              last view gone ──▶ release ──broker──▶ "store_free" ──▶ the producer's pool, warm for the next payload

Each process owns the segments it writes and keeps a pool of free slots by size class, because fresh shared memory costs
more in page faults than the copy itself. A slot is used again only when the consumer has finished the item and nothing
in its process looks at the memory any more; nobody has to be careful. A consumer owns what it takes and may write to
it; if it does and dies before it is done, the next consumer sees what it wrote.

Payloads of other nodes come over TCP in bounded chunks (store_server.py).
"""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.errors import PeerDiedError, StuckError
from rill.runtime.transfer.memory_copy import copy_bytes
from rill.runtime.transfer.ref import Ref, aligned
from rill.runtime.transfer.segments import LARGEST_SLAB_SLOT, SLAB_BYTES, Segment, slot_size
from rill.runtime.transfer.wire import Encoded, decode

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

POOL_BYTES = 256 * 1024 * 1024
"""Free memory that a process keeps for its next payloads; more while it has more in use, or where they are large."""
_ROTATION = 4
"""Large payloads that are under way at a time: making their memory anew for each would cost more than the copy."""
_LARGEST_POOL_BYTES = 1024 * 1024 * 1024
_CACHED_MAPS_BYTES = 4 * 1024 * 1024 * 1024
_FULL_WAIT_S = 600.0


def open_store(context: RuntimeContext) -> Store:
    """The store of this process."""
    from rill.runtime.transfer.store_server import RemoteReader

    remote = RemoteReader(context)
    store = Store(context.shm_dir, context.node_id, context.address.identity, fetch=remote.fetch)
    context.hub.on("store_free", store.free)
    return store


class Store:
    """Thread-safe. One per process or worker thread."""

    def __init__(
        self, shm_dir: Path, node_id: str, owner: str, fetch: Callable[[Ref], bytearray] | None = None
    ) -> None:
        self._shm_dir = shm_dir
        self._node_id = node_id
        self._owner = owner
        self._fetch = fetch
        self._own: dict[str, Segment] = {}
        self._free_slots: dict[int, list[tuple[str, int]]] = {}
        self._free_bytes = 0
        self._used_bytes = 0
        self._next_segment = 0
        self._mapped: OrderedDict[str, Segment] = OrderedDict()
        self._mapped_bytes = 0
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._pinned: dict[tuple[str, int], object] = {}
        self._guards: dict[int, weakref.ref[Any]] = {}

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, encoded: Encoded, timeout_s: float = _FULL_WAIT_S) -> Ref:
        """Copy a payload into shared memory; gives its reference. Waits while shared memory is full."""
        sizes = tuple(buffer.nbytes for buffer in encoded.buffers)
        header_bytes = len(encoded.header)
        total = aligned(header_bytes) + sum(map(aligned, sizes))
        slot_bytes = slot_size(total)
        segment, offset = self._allocate(slot_bytes, timeout_s)
        place = offset
        chunks: list[bytes | memoryview] = [encoded.header, *encoded.buffers]
        for chunk, num_bytes in zip(chunks, (header_bytes, *sizes), strict=True):
            if num_bytes:
                copy_bytes(memoryview(segment.map)[place : place + num_bytes], chunk)
            place += aligned(num_bytes)
        return Ref(self._node_id, self._owner, segment.name, offset, header_bytes, sizes)

    def free(self, slots: Sequence[tuple[str, int]]) -> None:
        """The broker says that nobody needs these slots any more: [segment, offset]…"""
        with self._lock:
            in_rotation_bytes = 0
            for name, offset in slots:
                segment = self._own.get(name)
                if segment is None:
                    continue
                in_rotation_bytes = max(in_rotation_bytes, _ROTATION * segment.slot_bytes)
                self._free_slots.setdefault(segment.slot_bytes, []).append((name, offset))
                self._pinned.pop((name, offset), None)
                self._free_bytes += segment.slot_bytes
                self._used_bytes -= segment.slot_bytes
            self._trim(max(POOL_BYTES, self._used_bytes, min(in_rotation_bytes, _LARGEST_POOL_BYTES)))
            self._freed.notify_all()

    def pin(self, ref: Ref, keep: object) -> None:
        """Keep something alive for as long as this payload may be read: memory on a GPU, say."""
        with self._lock:
            self._pinned[ref.slot] = keep

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, ref: Ref, on_release: Callable[[], None], *, device: str | None = None) -> Any:
        """The object, built on shared memory. `on_release` runs once nothing looks at that memory any more.

        It may run on any thread, at any moment, so it must neither block nor take a lock.
        """
        if ref.node_id != self._node_id:
            return self._read_remote(ref, on_release, device)
        segment = self._segment(ref.segment)
        root = np.frombuffer(segment.map, np.uint8, ref.num_bytes, ref.offset)
        header = bytes(root[: ref.header_bytes])
        buffers = _cut(root, aligned(ref.header_bytes), ref.sizes)
        self._guard(root, on_release)
        del root
        return decode(header, buffers, device=device)

    def _read_remote(self, ref: Ref, on_release: Callable[[], None], device: str | None) -> Any:
        assert self._fetch is not None, "this store has no door to other nodes"
        data = np.frombuffer(self._fetch(ref), np.uint8)
        on_release()
        buffers = _cut(data, aligned(ref.header_bytes), ref.sizes)
        return decode(bytes(data[: ref.header_bytes]), buffers, device=device)

    def view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """Bytes of a segment of this node, for a store server."""
        return memoryview(self._segment(name).map)[offset : offset + num_bytes]

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "used_bytes": self._used_bytes,
                "free_bytes": self._free_bytes,
                "num_segments": len(self._own),
                "mapped_bytes": self._mapped_bytes,
            }

    def close(self) -> None:
        """Forget the mappings. Files stay: others may not have read them yet; the hub deletes what is not needed."""
        with self._lock:
            self._mapped.clear()

    # --- memory -------------------------------------------------------------------------------------------

    def _allocate(self, slot_bytes: int, timeout_s: float) -> tuple[Segment, int]:
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while True:
                slots = self._free_slots.get(slot_bytes)
                if not slots:
                    slots = self._grow(slot_bytes, deadline_s)
                if slots:
                    name, offset = slots.pop()  # the last one freed is the warmest
                    self._free_bytes -= slot_bytes
                    self._used_bytes += slot_bytes
                    return self._own[name], offset

    def _grow(self, slot_bytes: int, deadline_s: float) -> list[tuple[str, int]] | None:
        """New slots of a size; None after a wait for freed memory, when there was no room for a new segment."""
        num_slots = SLAB_BYTES // slot_bytes if slot_bytes <= LARGEST_SLAB_SLOT else 1
        name = f"{self._owner}.{self._next_segment}"
        self._next_segment += 1
        try:
            segment = Segment(self._shm_dir / name, num_slots * slot_bytes, slot_bytes, create=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            if self._free_bytes:
                self._trim(0)
            elif time.monotonic() > deadline_s or not self._freed.wait(deadline_s - time.monotonic()):
                raise StuckError(
                    f"{self._owner}: no shared memory for a payload of {slot_bytes} bytes: {self._used_bytes} bytes are"
                    f" in channels and unread. Give channels a capacity, or the machine a larger {self._shm_dir.parent}"
                    " (for Docker: --shm-size)"
                ) from error
            return None
        self._own[name] = segment
        slots = self._free_slots.setdefault(slot_bytes, [])
        slots.extend((name, n * slot_bytes) for n in reversed(range(num_slots)))
        self._free_bytes += num_slots * slot_bytes
        return slots

    def _trim(self, keep_bytes: int) -> None:
        """Delete free segments, largest first, until the pool is small enough. Slabs stay."""
        if self._free_bytes <= keep_bytes:
            return
        for slot_bytes in sorted((s for s in self._free_slots if s > LARGEST_SLAB_SLOT), reverse=True):
            slots = self._free_slots[slot_bytes]
            while slots and self._free_bytes > keep_bytes:
                name, _ = slots.pop(0)
                self._free_bytes -= slot_bytes
                del self._own[name]
                (self._shm_dir / name).unlink(missing_ok=True)

    def _segment(self, name: str) -> Segment:
        with self._lock:
            segment = self._own.get(name) or self._mapped.get(name)
            if segment is not None:
                if name in self._mapped:
                    self._mapped.move_to_end(name)
                return segment
            try:
                segment = Segment(self._shm_dir / name, 0, create=False)
            except FileNotFoundError:
                raise PeerDiedError(f"{self._owner}: payload {name} is gone with its session") from None
            self._mapped[name] = segment
            self._mapped_bytes += segment.num_bytes
            while self._mapped_bytes > _CACHED_MAPS_BYTES and len(self._mapped) > 1:
                self._mapped_bytes -= self._mapped.popitem(last=False)[1].num_bytes
            return segment

    def _guard(self, root: Any, on_release: Callable[[], None]) -> None:
        key = id(root)

        def gone(_: Any) -> None:
            self._guards.pop(key, None)
            on_release()

        self._guards[key] = weakref.ref(root, gone)


def _cut(root: Any, start: int, sizes: Sequence[int]) -> list[memoryview]:
    buffers = []
    for num_bytes in sizes:
        buffers.append(memoryview(root[start : start + num_bytes]))
        start += aligned(num_bytes)
    return buffers
