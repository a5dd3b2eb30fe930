"""Point to point: any object from any process of the run to any other, and from one to all ranks of a group.

    send ──▶ peer's mailbox ──▶ arrivals by (group, rank, tag) ──▶ recv
      ▲                                                              │
      └── an answer, where the receiver copies out of device memory ◀┘

    from → to                                       object                          its GPU tensors
    the same rank                                   reference                       reference
    one node, the receiver sees the sender's GPU    the store: 1 copy (parcel.py)   IPC: 1 copy, on the device
    one node                                        the store: 1 copy               through the host
    two nodes                                       TCP from the store (tcp.py)     through the host

Objects from one peer with one tag arrive in order; others never wait for them. A send returns when the object may be
changed again. What nobody has received fills the store, and a full one makes senders wait. A peer's death ends every
wait on it with an error that names it; what it had sent and nobody had received may be lost.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rill.errors import PeerDiedError, StuckError, UserError
from rill.runtime.address import name_of
from rill.runtime.handle import Handle
from rill.runtime.process.call import Call
from rill.runtime.process.mailbox import Frames
from rill.runtime.process.waits import left_s, waiting
from rill.runtime.transfer import wire
from rill.runtime.transfer.device_ipc import Exporter, shares_a_device

if TYPE_CHECKING:
    from rill.runtime.address import WorkerAddress
    from rill.runtime.context import RuntimeContext

SEND = b"send"
NO_ANSWER = 0
"""In the place of a call's number: nobody waits for the receiver's word."""
DEFAULT_WAIT_S = 600.0
_BROADCAST = "\0broadcast"
_encode = msgspec.msgpack.Encoder().encode

Source: TypeAlias = tuple[str, str]
"""The sender's name, and the tag."""
Arrival: TypeAlias = Callable[[], Any]
"""Opens an object that has arrived; called once, in the thread that receives it."""


class PointToPoint:
    """This process's end of every transfer. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._me = context.address
        self._directory = context.directory
        self._changed = threading.Condition()
        self._arrivals: dict[Source, deque[Arrival]] = {}
        self.routes: Counter[str] = Counter()
        """How many objects this process sent by each route."""
        self._is_closed = False
        context.mailbox.on(SEND, self._on_send)
        self._directory.on_death(lambda *_: self._wake())

    def send(
        self, obj: Any, group: str, rank: int, *, tag: str = "", timeout_s: float = DEFAULT_WAIT_S
    ) -> None:
        if (group, rank) == (self._me.group, self._me.rank):
            self.routes["reference"] += 1
            self._deliver((self._me.name, tag), lambda: obj)
            return
        deadline_s = time.monotonic() + timeout_s
        self._send([self._directory.find(group, rank, timeout_s)], tag, obj, deadline_s)

    def broadcast(
        self, obj: Any, ranks: Sequence[int], *, source: int, timeout_s: float = DEFAULT_WAIT_S
    ) -> Any:
        """Called by every rank of this group; gives each what rank `source` gave."""
        group, rank = self._me.group, self._me.rank
        if source not in ranks:
            raise UserError(f"{group} has ranks {', '.join(map(str, ranks))}: rank {source} cannot broadcast")
        if rank != source:
            return self.recv(group, source, tag=_BROADCAST, timeout_s=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        peers = [self._directory.find(group, one, left_s(deadline_s)) for one in ranks if one != rank]
        self._send(peers, _BROADCAST, obj, deadline_s)
        return obj

    def _send(self, peers: Sequence[WorkerAddress], tag: str, obj: Any, deadline_s: float) -> None:
        """Written once, but for those who can open this rank's device memory."""
        near = [peer for peer in peers if shares_a_device(self._me, peer)]
        far = [peer for peer in peers if peer not in near]
        if far:
            self._post(far, tag, wire.encode(obj), deadline_s)
        for peer in near:
            exporter = Exporter(self._me, peer)
            encoded = wire.encode(obj, device_hook=exporter)
            self._post([peer], tag, encoded, deadline_s, exporter.kind)

    def _post(
        self,
        peers: Sequence[WorkerAddress],
        tag: str,
        encoded: wire.Encoded,
        deadline_s: float,
        exported: str = "",
    ) -> None:
        """One object to peers that are not this process. `exported`: the kind of device on which some of it stays until
        the (then only) peer has copied it, which it tells as it would answer a call."""
        context = self._context
        frames = context.parcels.pack(encoded, (peer.identity for peer in peers), left_s(deadline_s))
        for peer in peers:
            near = "shared_memory" if peer.node_id == context.site.node_id else "tcp"
            self.routes[f"{exported}_ipc" if exported else near if frames[0] else "message"] += 1
        if exported:
            handle = Handle(f"send to {peers[0].name}", peers, context.late)
            context.calls.call(handle, tag, frames, kind=SEND)
            handle.wait(left_s(deadline_s))
            return
        call = _encode(Call(NO_ANSWER, 0, tag, False, self._me.identity))
        for peer in peers:
            context.mailbox.post(peer.endpoint_from(context.site.node_id), [SEND, call, *frames])

    def recv(self, group: str, rank: int, *, tag: str = "", timeout_s: float = DEFAULT_WAIT_S) -> Any:
        deadline_s = time.monotonic() + timeout_s
        name = f"{group}[{rank}]"
        source = (name, tag)
        with waiting(f"recv from {name}", name):
            # Asked outside the lock, because it may ask the hub; a death after that ends the wait.
            peer = None if source in self._arrivals else self._directory.find(group, rank, timeout_s)
            with self._changed:
                self._changed.wait_for(
                    lambda: source in self._arrivals or self._end_of(peer), left_s(deadline_s)
                )
                if source in self._arrivals:
                    line = self._arrivals[source]
                    arrival = line.popleft()
                    if not line:
                        del self._arrivals[source]  # a tag may be used only once
                elif end := self._end_of(peer):
                    raise PeerDiedError(f"{self._me.name}: recv from {name}: {end}")
                else:
                    raise StuckError(f"{self._me.name}: recv from {name} did not end within {timeout_s:g} s")
        return arrival()

    def close(self) -> None:
        """End every wait; the process ends."""
        self._is_closed = True
        self._wake()

    def _end_of(self, peer: WorkerAddress | None) -> str:
        """Why nothing will come of a peer; empty: it may."""
        if peer is not None and peer.identity in self._directory.dead:
            return f"{peer.name} is gone: {self._directory.dead[peer.identity]}"
        return "this process is closing" if self._is_closed else ""

    def _deliver(self, source: Source, arrival: Arrival) -> None:
        with self._changed:
            self._arrivals.setdefault(source, deque()).append(arrival)
            self._changed.notify_all()

    def _on_send(self, sender: str, frames: Frames) -> None:
        call = Call.read(sender, frames)

        def arrival() -> Any:
            try:
                return self._context.parcels.unpack(call.payload, sender)
            finally:
                if call.call_id != NO_ANSWER:
                    call.answer_at_once(self._context)

        self._deliver((name_of(call.identity), call.method), arrival)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
