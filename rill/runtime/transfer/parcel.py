"""How one encoded object is carried to other processes of the same node: inside the message, or in shared memory.

    small   header and buffers are frames of the message
    large   one copy into a slot of this process's store; the message holds the slot's place; the reader builds
            its objects on the memory itself and tells the owner when nothing looks at it any more

A slot may be lent to several readers at once (a broadcast, a group call): it is written once, and because readers
may write to what they receive, each takes a copy of its own. A reader's death gives its slots back.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rill.runtime.process.mailbox import Frames
from rill.runtime.transfer import wire

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

FREE = b"free"
INLINE_MAX_BYTES = 64 * 1024
"""Larger objects go through shared memory where both ends have it."""

Slot: TypeAlias = tuple[str, int]


class Reader(Protocol):
    """Whom a parcel is for."""

    @property
    def identity(self) -> str: ...

    @property
    def node_id(self) -> str: ...


def pack_inline(encoded: wire.Encoded) -> Frames:
    """The frames that carry `encoded` to anybody, any number of times."""
    return [b"", *wire.frames_of(encoded)]


class Parcels:
    """Packs and unpacks for one process. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._readers: Counter[Slot] = Counter()
        self._lent: dict[str, Counter[Slot]] = {}
        self._dead: set[str] = set()
        # A release may come from a destructor at any moment: SimpleQueue.put is safe there, a lock is not.
        self._released: queue.SimpleQueue[tuple[str, Slot] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        context.mailbox.on(FREE, self._on_free)

    def pack(self, encoded: wire.Encoded, readers: Sequence[Reader]) -> Frames:
        """The frames that carry `encoded` to each of `readers`; the first tells how."""
        node_id = self._context.node_id
        is_shared = encoded.num_bytes > INLINE_MAX_BYTES and all(
            reader.node_id == node_id for reader in readers
        )
        if not is_shared:
            return pack_inline(encoded)
        ref = self._context.store.write(encoded)
        slot = (ref[2], ref[3])
        with self._lock:
            self._readers[slot] = len(readers)
            for reader in readers:
                self._lent.setdefault(reader.identity, Counter())[slot] += 1
            dead = {reader.identity for reader in readers} & self._dead
        for identity in dead:
            self.peer_died(identity)
        place = (self._context.mailbox.endpoint, len(readers) > 1, list(ref))
        return [pickle.dumps(place)]

    def unpack(self, frames: Frames, *, device: str | None = None) -> Any:
        """The object. Call once per message."""
        if not frames[0]:
            # Frames are read-only, and what is received may be written to.
            return wire.decode(frames[1], [bytearray(frame) for frame in frames[2:]], device=device)
        owner_endpoint, is_for_several, ref = pickle.loads(frames[0])
        slot: Slot = (ref[2], ref[3])
        if is_for_several:
            header, buffers = self._copy_out(ref)
            self._release(owner_endpoint, slot)
            return wire.decode(header, buffers, device=device)
        return self._context.store.read(ref, lambda: self._release(owner_endpoint, slot), device=device)

    def peer_died(self, identity: str) -> None:
        """Take back what a dead process had borrowed."""
        with self._lock:
            self._dead.add(identity)
            lent = self._lent.pop(identity, Counter())
        for slot, count in lent.items():
            self._give_back(slot, count)

    def num_lent(self) -> int:
        """Slots that some reader still holds."""
        with self._lock:
            return len(self._readers)

    def close(self) -> None:
        """Stop telling owners about releases; everything ends now."""
        self._released.put(None)

    def _copy_out(self, ref: Sequence[Any]) -> tuple[bytes, list[memoryview]]:
        import numpy as np

        from rill.runtime.transfer.memory_copy import copy_bytes
        from rill.runtime.transfer.segments import aligned

        _, _, name, offset, header_bytes, sizes, _ = ref
        header = bytes(self._context.store.view(name, offset, header_bytes))
        offset += aligned(header_bytes)
        buffers = []
        for num_bytes in sizes:
            own = np.empty(num_bytes, np.uint8)
            copy_bytes(own, self._context.store.view(name, offset, num_bytes))
            buffers.append(own.data)
            offset += aligned(num_bytes)
        return header, buffers

    def _release(self, owner_endpoint: str, slot: Slot) -> None:
        self._released.put((owner_endpoint, slot))
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._tell_owners, name="rill-release", daemon=True
                    )
                    self._thread.start()

    def _tell_owners(self) -> None:
        identity = self._context.address.identity
        while (released := self._released.get()) is not None:
            owner_endpoint, slot = released
            self._context.mailbox.post(owner_endpoint, [FREE, pickle.dumps((identity, slot))])

    def _on_free(self, frames: Frames) -> None:
        identity, slot = pickle.loads(frames[0])
        with self._lock:
            lent = self._lent.get(identity)
            if lent is None or lent[slot] == 0:
                return  # taken back when the reader was declared dead
            lent[slot] -= 1
            if lent[slot] == 0:
                del lent[slot]
        self._give_back(slot, 1)

    def _give_back(self, slot: Slot, count: int) -> None:
        with self._lock:
            self._readers[slot] -= count
            is_free = self._readers[slot] <= 0
            if is_free:
                del self._readers[slot]
        if is_free:
            self._context.store.free([slot])
