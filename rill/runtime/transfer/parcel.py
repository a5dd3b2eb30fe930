"""How an encoded object is carried to other processes, by calls and sends alike: inside the message, or by reference.

    small   header and buffers are frames of the message
    large   one copy into a slot of this process's store; the message holds the slot's place. A reader of this node
            builds its objects on the memory itself and tells the owner when nothing looks at it any more

A slot may be lent to several readers at once (a broadcast, a group call): it is written once, and each takes a copy of
its own. A reader's death gives its slots back.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rill.runtime.process.mailbox import Frames
from rill.runtime.transfer import wire
from rill.runtime.transfer.segments import FULL_WAIT_S, Ref

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

FREE = b"free"
INLINE_MAX_BYTES = 64 * 1024
"""Larger objects go through the store."""

Slot: TypeAlias = tuple[str, int]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Ref, bool]).decode


def pack_inline(encoded: wire.Encoded) -> Frames:
    """The frames that carry `encoded` to anybody, any number of times."""
    return [b"", encoded.header, *encoded.buffers]


class Parcels:
    """Packs and unpacks for one process. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self.lent: dict[Slot, Counter[str]] = {}
        """slot -> how often it is lent to whom, by identity."""
        self._released: deque[tuple[str, Slot]] = deque()
        context.mailbox.on(FREE, lambda _, frames: self._returned(*pickle.loads(frames[0])))
        context.hub.add_ticker(self._tell_owners)
        context.directory.on_death(lambda identity, _: self.peer_died(identity))

    def pack(self, encoded: wire.Encoded, readers: Iterable[str], timeout_s: float = FULL_WAIT_S) -> Frames:
        """The frames that carry `encoded` to each of `readers`, by identity; the first tells how."""
        if encoded.num_bytes <= INLINE_MAX_BYTES:
            return pack_inline(encoded)
        ref = self._context.store.write(encoded, timeout_s)
        lent = Counter(readers)
        is_for_several = lent.total() > 1
        with self._lock:
            self.lent[ref.slot] = lent
        for reader in list(lent):
            if reader in self._context.directory.dead:
                self.peer_died(reader)
        return [_encode((ref, is_for_several))]

    def unpack(self, frames: Frames, sender: str) -> Any:
        """The object; its tensors that were on a GPU arrive on this process's device. Call once per message. `sender`:
        the mailbox of the owner, which hears when it has been read."""
        device = self._context.torch_device
        if not frames[0]:
            # Frames are read-only, and what is received may be written to.
            return wire.decode(frames[1], [bytearray(frame) for frame in frames[2:]], device=device)
        ref, is_for_several = _decode(frames[0])

        def release() -> None:
            """Perhaps from a finalizer, at any moment: no lock may be taken here."""
            self._released.append((sender, ref.slot))
            self._context.hub.wake()

        if not is_for_several:
            return self._context.store.read(ref, release, device=device)
        try:
            header, buffers = self._context.store.load(ref)
        finally:
            release()
        return wire.decode(header, buffers, device=device)

    def peer_died(self, identity: str) -> None:
        """Take back what a dead process had borrowed."""
        with self._lock:
            counts = [(slot, readers[identity]) for slot, readers in self.lent.items()]
        for slot, count in counts:
            for _ in range(count):
                self._returned(identity, slot)

    def _tell_owners(self, _: float) -> float:
        """On the hub's io thread."""
        identity = self._context.address.identity
        while self._released:
            owner, slot = self._released.popleft()
            self._context.mailbox.post(owner, [FREE, pickle.dumps((identity, slot))])
        return 1.0

    def _returned(self, identity: str, slot: Slot) -> None:
        """By a reader; not again what was taken back when it was declared dead."""
        with self._lock:
            readers = self.lent.get(slot, Counter())
            if not readers[identity]:
                return
            readers[identity] -= 1
            is_free = not readers.total()
            if is_free:
                del self.lent[slot]
        if is_free:
            self._context.store.free([slot])
