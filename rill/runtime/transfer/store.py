"""A node's payload store, seen from one process: shared memory, written once by producers, read in place by consumers.

    producer: encode ──copy──▶ slot of a segment        the slot's place (`Ref`) travels through the broker or a message
    consumer: map the segment (cached) ──▶ objects built on the memory itself, no copy
              last view gone ──▶ release ──▶ told to the owner ──▶ its pool, warm for the next payload

Each process owns the segments it writes and keeps a pool of free slots by size class: fresh shared memory costs more
than the copy. A slot is used again only when the consumer has finished the item and nothing in its process looks at
it. A consumer may write to what it takes; if it dies before it is done, the next one sees what it wrote. Payloads of
other nodes come over TCP (tcp.py).
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.address import STORE_GROUP, Site
from rill.runtime.hub.client import HubClient
from rill.runtime.transfer.memory_copy import copy_bytes
from rill.runtime.transfer.segments import (
    FULL_WAIT_S,
    LARGEST_SLAB_SLOT,
    SLAB_BYTES,
    Ref,
    Segment,
    aligned,
    owner_of,
    slot_size,
    unlink,
)
from rill.runtime.transfer.tcp import ByteClient, ByteServer
from rill.runtime.transfer.wire import Encoded, decode

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

POOL_BYTES = 256 * 1024 * 1024
"""Free memory that a process keeps for its next payloads; more while it has more in use, or where they are large."""
_ROTATION = 4
"""Large payloads that are under way at a time: making their memory anew for each would cost more than the copy."""
_LARGEST_POOL_BYTES = 1024 * 1024 * 1024
_LOOK_S = 0.2
"""Other processes free shared memory too, and do not tell: how often a full one is tried again."""
_FETCH_WAIT_S = 120.0


def open_store(context: RuntimeContext) -> Store:
    """This process's; it fetches payloads of other nodes from their store servers."""
    site = context.site

    @cache
    def server_of(node_id: str) -> ByteClient:
        def find(timeout_s: float) -> str:
            return str(context.hub.call("registry.find", f"{STORE_GROUP}{node_id}[0]", timeout_s))

        assert site.key is not None, "payloads of other nodes in a session that has one node"
        return ByteClient(site.key, find, f"{node_id}'s store", timeout_s=_FETCH_WAIT_S)

    def fetch(ref: Ref) -> bytearray:
        return server_of(ref.node_id).fetch(ref.segment, ref.offset, ref.num_bytes, ref.header_bytes)

    store = Store(site.shm_dir, site.node_id, context.address.identity, fetch=fetch)
    context.hub.on("store_free", store.free)
    context.directory.on_death(lambda identity, _: store.owner_died(identity))
    return store


class Store:
    """Thread-safe. One per process."""

    def __init__(
        self, shm_dir: Path, node_id: str, owner: str, fetch: Callable[[Ref], bytearray] | None = None
    ) -> None:
        """`fetch` gives a payload of another node, laid out as in its slot."""
        self._shm_dir = shm_dir
        self._node_id = node_id
        self._owner = owner
        self._fetch = fetch
        self._own: dict[str, Segment] = {}
        self._free_slots: dict[int, list[tuple[str, int]]] = {}
        """By size of slot; the last one freed is the warmest."""
        self._free_bytes = 0
        self._used_bytes = 0
        self._next_segment = 0
        self._mapped: dict[str, Segment] = {}
        """Of other processes, by name: mapping costs more than reading."""
        self._dead: set[str] = set()
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, encoded: Encoded, timeout_s: float = FULL_WAIT_S) -> Ref:
        """Copy a payload into shared memory; gives its reference. Waits while shared memory is full."""
        sizes = tuple(buffer.nbytes for buffer in encoded.buffers)
        header_bytes = len(encoded.header)
        slot_bytes = slot_size(aligned(header_bytes) + sum(map(aligned, sizes)))
        segment, offset = self._allocate(slot_bytes, timeout_s)
        place = offset
        chunks: list[bytes | memoryview] = [encoded.header, *encoded.buffers]
        for chunk, num_bytes in zip(chunks, (header_bytes, *sizes), strict=True):
            if num_bytes:
                copy_bytes(memoryview(segment.map)[place : place + num_bytes], chunk)
            place += aligned(num_bytes)
        return Ref(self._node_id, self._owner, segment.name, offset, header_bytes, sizes)

    def free(self, slots: Sequence[tuple[str, int]]) -> None:
        """Nobody needs these slots any more: [segment, offset]…"""
        with self._lock:
            in_rotation_bytes = 0
            for name, offset in slots:
                segment = self._own.get(name)
                if segment is None:
                    continue
                in_rotation_bytes = max(in_rotation_bytes, _ROTATION * segment.slot_bytes)
                self._free_slots.setdefault(segment.slot_bytes, []).append((name, offset))
                self._free_bytes += segment.slot_bytes
                self._used_bytes -= segment.slot_bytes
            self._trim(max(POOL_BYTES, self._used_bytes, min(in_rotation_bytes, _LARGEST_POOL_BYTES)))
            self._freed.notify_all()

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, ref: Ref, on_release: Callable[[], None], *, device: str | None = None) -> Any:
        """The object, built on shared memory. `on_release` runs once nothing looks at that memory any more.

        It may run on any thread, at any moment, so it must neither block nor take a lock.
        """
        if ref.node_id != self._node_id:
            header, buffers = self.load(ref)
            on_release()
            return decode(header, buffers, device=device)
        root = np.frombuffer(self._segment(ref.segment).map, np.uint8, ref.num_bytes, ref.offset)
        header, buffers = _cut(root, ref)
        weakref.finalize(root, on_release).atexit = False
        del root
        return decode(header, buffers, device=device)

    def load(self, ref: Ref) -> tuple[bytes, list[memoryview]]:
        """The payload's header and buffers, copied into this process's memory."""
        if ref.node_id != self._node_id:
            assert self._fetch is not None, "this store has no way to other nodes"
            return _cut(np.frombuffer(self._fetch(ref), np.uint8), ref)
        own = np.empty(ref.num_bytes, np.uint8)
        copy_bytes(own, self.view(ref.segment, ref.offset, ref.num_bytes))
        return _cut(own, ref)

    def view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._segment(name).map)[offset : offset + num_bytes]

    def owner_died(self, identity: str) -> None:
        """A process is gone: what was mapped of it stays only where somebody looks at it."""
        with self._lock:
            self._dead.add(identity)
            self._mapped = {name: one for name, one in self._mapped.items() if owner_of(name) != identity}

    def drop_unlinked(self) -> None:
        """Nobody can ask for what lies in these any more."""
        with self._lock:
            self._mapped = {
                name: one for name, one in self._mapped.items() if (self._shm_dir / name).exists()
            }

    def close(self) -> None:
        """Forget the mappings. Files stay: others may not have read them yet; the hub deletes what is not needed."""
        with self._lock:
            self._mapped.clear()

    # --- memory -------------------------------------------------------------------------------------------

    def _allocate(self, slot_bytes: int, timeout_s: float) -> tuple[Segment, int]:
        """Segments are made, and a full memory is waited for, without the lock: slots come back meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if slots := self._free_slots.get(slot_bytes):
                    name, offset = slots.pop()
                    self._free_bytes -= slot_bytes
                    self._used_bytes += slot_bytes
                    return self._own[name], offset
                name = f"{self._owner}.{self._next_segment}"
                self._next_segment += 1
            segment = self._new_segment(name, slot_bytes)
            with self._lock:
                if segment is not None:
                    self._add(segment)
                elif not self._free_slots.get(slot_bytes) and not self._trim(0):
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise StuckError(
                            f"{self._owner}: no shared memory for a payload of {slot_bytes} bytes: {self._used_bytes} "
                            "bytes are in channels and unread. Give channels a capacity, or the machine a larger "
                            f"{self._shm_dir.parent} (for Docker: --shm-size)"
                        )
                    self._freed.wait(min(left_s, _LOOK_S))

    def _new_segment(self, name: str, slot_bytes: int) -> Segment | None:
        """None where there is no room at the moment."""
        num_slots = SLAB_BYTES // slot_bytes if slot_bytes <= LARGEST_SLAB_SLOT else 1
        try:
            return Segment(self._shm_dir / name, num_slots * slot_bytes, slot_bytes, create=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
        capacity = shutil.disk_usage(self._shm_dir).total
        if slot_bytes > capacity:
            raise RunError(
                f"{self._owner}: a payload of {slot_bytes} bytes can never fit into shared memory, which has {capacity}"
                f": send it in parts, or give the machine a larger {self._shm_dir.parent} (for Docker: --shm-size)"
            )
        return None

    def _add(self, segment: Segment) -> None:
        self._own[segment.name] = segment
        offsets = range(0, segment.num_bytes, segment.slot_bytes)
        slots = self._free_slots.setdefault(segment.slot_bytes, [])
        slots.extend((segment.name, offset) for offset in reversed(offsets))
        self._free_bytes += segment.num_bytes

    def _trim(self, keep_bytes: int) -> bool:
        """Give up segments in which every slot is free, largest first, until the pool is small enough; whether there
        was one. With nothing to keep slabs go too: otherwise they are worth more than they cost."""
        if self._free_bytes <= keep_bytes:
            return False
        has_trimmed = False
        for slot_bytes in sorted(self._free_slots, reverse=True):
            if slot_bytes <= LARGEST_SLAB_SLOT and keep_bytes > 0:
                break
            slots = self._free_slots[slot_bytes]
            for name, num_free in Counter(name for name, _ in slots).items():  # the coldest first
                if self._free_bytes <= keep_bytes:
                    return has_trimmed
                if num_free * slot_bytes < self._own[name].num_bytes:
                    continue
                segment = self._own.pop(name)
                slots[:] = [slot for slot in slots if slot[0] != name]
                self._free_bytes -= segment.num_bytes
                segment.discard(self._shm_dir / name)
                has_trimmed = True
        return has_trimmed

    def _segment(self, name: str) -> Segment:
        with self._lock:
            segment = self._own.get(name) or self._mapped.get(name)
            if segment is not None:
                return segment
            try:
                segment = Segment(self._shm_dir / name, 0, create=False)
            except FileNotFoundError:
                raise PeerDiedError(
                    f"{self._owner}: payload {name} is gone with its owner or its session"
                ) from None
            if owner_of(name) not in self._dead:
                self.drop_unlinked()
                self._mapped[name] = segment
            return segment


def _cut(root: Any, ref: Ref) -> tuple[bytes, list[memoryview]]:
    """The header and the buffers of a payload that lies in `root`."""
    header = bytes(root[: ref.header_bytes])
    buffers, start = [], aligned(ref.header_bytes)
    for num_bytes in ref.sizes:
        buffers.append(memoryview(root[start : start + num_bytes]))
        start += aligned(num_bytes)
    return header, buffers


# --- the process that serves a node's payloads to the others -----------------------------------------------


def main(start: bytes) -> None:
    """Entry of a node's store server, where a run has several nodes. It holds no payload of its own: it maps what the
    node's workers wrote, so a worker's death loses nothing."""
    site = pickle.loads(start)
    assert isinstance(site, Site)
    serve_store(site, os.getpid())
    while True:
        signal.pause()  # until the agent ends the session


def serve_store(site: Site, launch: int) -> tuple[ByteServer, HubClient]:
    """Serve the payloads of the site's node to the other nodes from now on. It may be killed at any moment: the agent
    starts it again, under a new identity, and readers ask the hub for its new address. Of a payload only the header,
    which is unpickled, is signed (tcp.py)."""
    assert site.key is not None, "a store server in a session that has one node"
    identity = f"{STORE_GROUP}{site.node_id}[0]#{launch}"
    # A store of its own, which outlives the owners of what it maps: their payloads may still be asked for.
    store = Store(site.shm_dir, site.node_id, identity)

    def carry_out(order: tuple[str, list[str]]) -> None:
        unlink(site.shm_dir, *order)
        store.drop_unlinked()

    def read(name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
        return store.view(name, offset, num_bytes), offset + num_bytes

    server = ByteServer(site.host, site.key, read)
    hub = HubClient(site.hub_endpoint, identity, site.key, server.endpoint)
    hub.on("store_unlink", carry_out)
    return server, hub.start()
