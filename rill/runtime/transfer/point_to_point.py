"""Point to point: any object from any process of the run to any other, and from one to all ranks of a group.

    send ──▶ peer's mailbox ──▶ arrivals by (group, rank, tag) ──▶ recv
      ▲                                                              │
      └── receipt, for what the receiver copies out of device memory ◀┘

The route follows from where both ends and the data are:

    from → to                                       object                          its GPU tensors
    the same rank                                   reference                       reference
    one node, the receiver sees the sender's GPU    the store: 1 copy (parcel.py)   IPC: 1 copy, on the device
    one node                                        the store: 1 copy               through the host
    two nodes                                       TCP from the store (tcp.py)     through the host

Small objects travel inside the message. Objects from one peer with one tag arrive in the order they were sent; other
tags and other peers never wait for them. A send returns when the object may be changed again: as soon as it is in the
store, or has been copied from device to device. What nobody has received yet fills the store, and a full one makes
senders wait; where a producer runs ahead of its consumer, use a channel with a capacity. Every wait has a deadline. A
peer's death ends every wait on it with an error that names it; what it had sent and nobody had received may be lost.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from rill.errors import PeerDiedError, StuckError, UserError
from rill.runtime.process.mailbox import Frames
from rill.runtime.process.waits import waiting
from rill.runtime.transfer import wire
from rill.runtime.transfer.device_ipc import Exporter, has_device_tensors, shares_a_device
from rill.runtime.transfer.future import in_thread

if TYPE_CHECKING:
    from rill.runtime.address import WorkerAddress
    from rill.runtime.context import RuntimeContext
    from rill.runtime.process.directory import Directory

T = TypeVar("T")

SEND, RECEIPT = b"send", b"rcpt"
DEFAULT_WAIT_S = 600.0
_BROADCAST = "\0broadcast"

Source: TypeAlias = tuple[str, int, str]
"""Group, rank and tag."""
Arrival: TypeAlias = Callable[[], Any]
"""Opens an object that has arrived; called once, in the thread that receives it."""


class _Envelope(NamedTuple):
    """What is said of an object on its way."""

    source: Source
    """The sender, and the tag."""
    reply_to: str
    """The sender's mailbox."""
    number: int
    """What the receipt names; 0: nobody waits for one."""


class PointToPoint:
    """This process's end of every transfer. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._me = context.address
        self._directory: Directory = context.directory
        self._changed = threading.Condition()
        self._arrivals: dict[Source, deque[Arrival]] = {}
        self._places: dict[Source, deque[Future[Arrival]]] = {}
        """Receives that wait, by whom they wait for."""
        self._unreceived: set[int] = set()
        """Sends that wait for their receipt."""
        self._numbers = count(1)
        self._deaths: dict[str, str] = {}
        self._last: dict[Source, Future[Any]] = {}
        """The newest asynchronous send of each receiver and tag."""
        self._routes: dict[str, int] = {}
        context.mailbox.on(SEND, self._on_send)
        context.mailbox.on(RECEIPT, self._on_receipt)
        self._directory.on_death(self._on_death)

    # --- sending ------------------------------------------------------------------------------------------

    def send(
        self, obj: Any, group: str, rank: int, *, tag: str = "", timeout_s: float = DEFAULT_WAIT_S
    ) -> None:
        """Send `obj`; returns when it may be changed again."""
        if (group, rank, tag) in self._last:  # keep the order of what was sent before
            self._await(self.send_async(obj, group, rank, tag=tag), f"send to {group}[{rank}]", timeout_s)
            return
        self._send(obj, group, rank, tag, time.monotonic() + timeout_s)

    def send_async(self, obj: Any, group: str, rank: int, *, tag: str = "") -> Future[None]:
        """As `send`, from another thread; `obj` must not be changed before the future is done."""
        deadline_s = time.monotonic() + DEFAULT_WAIT_S
        return self._in_order(
            (group, rank, tag),
            lambda: self._send(obj, group, rank, tag, deadline_s),
            f"send to {group}[{rank}]",
        )

    def broadcast(
        self, obj: Any, ranks: Sequence[int], *, source: int, timeout_s: float = DEFAULT_WAIT_S
    ) -> Any:
        """Called by every rank of this group; gives each what rank `source` gave. Written once."""
        group, rank = self._me.group, self._me.rank
        self._check_source(ranks, source)
        if rank != source:
            return self.recv(group, source, tag=_BROADCAST, timeout_s=timeout_s)
        if (group, rank, _BROADCAST) in self._last:
            return self._await(
                self.broadcast_async(obj, ranks, source=source), f"broadcast in {group}", timeout_s
            )
        self._send_to_others(obj, ranks, time.monotonic() + timeout_s)
        return obj

    def broadcast_async(self, obj: Any, ranks: Sequence[int], *, source: int) -> Future[Any]:
        """The same, without waiting: `obj` must not be changed before the future is done."""
        group, rank = self._me.group, self._me.rank
        self._check_source(ranks, source)
        if rank != source:
            return self.recv_async(group, source, tag=_BROADCAST)
        deadline_s = time.monotonic() + DEFAULT_WAIT_S

        def give() -> Any:
            self._send_to_others(obj, ranks, deadline_s)
            return obj

        return self._in_order((group, rank, _BROADCAST), give, f"broadcast in {group}")

    def _send(self, obj: Any, group: str, rank: int, tag: str, deadline_s: float) -> None:
        if (group, rank) == (self._me.group, self._me.rank):
            self._count("reference")
            self._deliver((group, rank, tag), lambda: obj)
            return
        peer = self._directory.find(group, rank, _left_s(deadline_s))
        exporter = self._exporter_for(peer)
        encoded = wire.encode(obj, device_hook=exporter)
        self._post([peer], tag, encoded, deadline_s, exporter.kind if exporter is not None else "")

    def _send_to_others(self, obj: Any, ranks: Sequence[int], deadline_s: float) -> None:
        """To every other rank of the group. GPU tensors go to each by its own route."""
        group = self._me.group
        others = [rank for rank in ranks if rank != self._me.rank]
        peers = [self._directory.find(group, rank, _left_s(deadline_s)) for rank in others]
        if any(map(self._exporter_for, peers)) and has_device_tensors(obj):
            sending = [self.send_async(obj, group, rank, tag=_BROADCAST) for rank in others]
            for rank, one in zip(others, sending, strict=True):
                self._await(one, f"broadcast to {group}[{rank}]", _left_s(deadline_s))
        elif peers:
            self._post(peers, _BROADCAST, wire.encode(obj), deadline_s)

    def _exporter_for(self, peer: WorkerAddress) -> Exporter | None:
        """What takes device tensors out of an object for `peer`; None where they travel through the host."""
        if "torch" not in sys.modules or not shares_a_device(self._me, peer):
            return None
        return Exporter(self._me, peer)

    def _post(
        self,
        peers: Sequence[WorkerAddress],
        tag: str,
        encoded: wire.Encoded,
        deadline_s: float,
        exported: str = "",
    ) -> None:
        """One object to peers that are not this process. `exported`: the kind of device on which some of it stays until
        the (then only) peer has copied it."""
        context, me = self._context, self._me
        frames = context.parcels.pack(encoded, peers, _left_s(deadline_s))
        number = next(self._numbers) if exported else 0
        try:
            if exported:
                self._unreceived.add(number)
            for peer in peers:
                envelope = _Envelope((me.group, me.rank, tag), me.endpoint_from(peer.node_id), number)
                message = [SEND, pickle.dumps(tuple(envelope)), *frames]
                context.mailbox.post(peer.endpoint_from(context.node_id), message)
                near = "shared_memory" if peer.node_id == context.node_id else "tcp"
                self._count(f"{exported}_ipc" if exported else near if frames[0] else "message")
            if exported:
                self._wait_received(number, peers[0], deadline_s)
        finally:
            self._unreceived.discard(number)

    def _wait_received(self, number: int, peer: WorkerAddress, deadline_s: float) -> None:
        """Until the peer has copied what lies in our device memory, which may then change."""
        with self._changed, waiting(f"send to {peer.name}", peer.name):
            in_time = self._changed.wait_for(
                lambda: peer.identity in self._deaths or number not in self._unreceived,
                _left_s(deadline_s),
            )
            death = self._deaths.get(peer.identity)
        if death is not None:
            raise PeerDiedError(f"{self._me.name}: send to {peer.name}, which is gone: {death}")
        if not in_time:
            raise StuckError(f"{self._me.name}: send waited for {peer.name} to receive until its deadline")

    def _in_order(self, lane: Source, work: Callable[[], T], what: str) -> Future[T]:
        """Do it in a thread, after what was put into the same lane before and before what comes after."""
        future: Future[T] = Future()

        def start(_: object = None) -> None:
            in_thread(work, f"rill-{what}", future)

        def ended(_: object) -> None:
            with self._changed:
                if self._last.get(lane) is future:
                    del self._last[lane]

        with self._changed:
            before = self._last.get(lane)
            self._last[lane] = future
        future.add_done_callback(ended)
        if before is None:
            start()
        else:
            before.add_done_callback(start)
        return future

    def _await(self, future: Future[T], what: str, timeout_s: float) -> T:
        with waiting(f"{self._me.name}: {what}", what):
            try:
                return future.result(timeout_s)
            except TimeoutError:
                if future.done():
                    raise
                raise StuckError(f"{self._me.name}: {what} did not end within {timeout_s:g} s") from None

    # --- receiving ----------------------------------------------------------------------------------------

    def recv(self, group: str, rank: int, *, tag: str = "", timeout_s: float = DEFAULT_WAIT_S) -> Any:
        """The next object from a worker with this tag."""
        source = (group, rank, tag)
        place = self._line_up(source)
        what = f"recv from {group}[{rank}]"
        try:
            arrival = self._await(place, what, timeout_s)
        except BaseException:
            self._leave(source, place)
            raise
        return arrival()

    def recv_async(self, group: str, rank: int, *, tag: str = "") -> Future[Any]:
        """A place in the line for the next object from a worker."""
        source = (group, rank, tag)
        place = self._line_up(source)
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: self._leave(source, place) if done.cancelled() else None)
        place.add_done_callback(
            lambda _: in_thread(lambda: place.result()(), f"rill-recv from {group}[{rank}]", future)
        )
        return future

    def routes(self) -> dict[str, int]:
        """How many objects this process sent by each route."""
        with self._changed:
            return dict(self._routes)

    def close(self) -> None:
        """End every wait; the process ends."""
        with self._changed:
            places = [place for line in self._places.values() for place in line]
            self._places.clear()
        for place in places:
            place.set_exception(PeerDiedError(f"{self._me.name}: recv: this worker is closing"))

    def _line_up(self, source: Source) -> Future[Arrival]:
        group, rank, _ = source
        place: Future[Arrival] = Future()
        with self._changed:
            if source in self._arrivals:
                place.set_result(_take_first(self._arrivals, source))
                return place
            self._places.setdefault(source, deque()).append(place)
        # Asked outside the lock, because it may ask the hub; a later death finds the place in the line.
        death = self._directory.death_of(group, rank)
        if death is not None and self._withdraw(source, place):
            place.set_exception(self._gone(source, death))
        return place

    def _gone(self, source: Source, reason: str) -> PeerDiedError:
        group, rank, _ = source
        return PeerDiedError(f"{self._me.name}: recv from {group}[{rank}]: {group}[{rank}] is gone: {reason}")

    def _withdraw(self, source: Source, place: Future[Arrival]) -> bool:
        with self._changed:
            line = self._places.get(source)
            if not line or place not in line:
                return False
            line.remove(place)
            if not line:
                del self._places[source]
            return True

    def _leave(self, source: Source, place: Future[Arrival]) -> None:
        """A receive that was given up or interrupted: what has just come for it is the next one's."""
        if not self._withdraw(source, place) and place.exception() is None:
            self._deliver(source, place.result(), is_first=True)

    def _deliver(self, source: Source, arrival: Arrival, *, is_first: bool = False) -> None:
        with self._changed:
            place = _take_first(self._places, source) if source in self._places else None
            if place is None:
                line = self._arrivals.setdefault(source, deque())
                line.appendleft(arrival) if is_first else line.append(arrival)
        if place is not None:
            place.set_result(arrival)

    # --- events, on the inbox thread ----------------------------------------------------------------------

    def _on_send(self, frames: Frames) -> None:
        envelope = _Envelope(*pickle.loads(frames[0]))

        def arrival() -> Any:
            context = self._context
            try:
                return context.parcels.unpack(frames[1:], device=context.torch_device)
            finally:
                if envelope.number:
                    context.mailbox.post(envelope.reply_to, [RECEIPT, pickle.dumps(envelope.number)])

        self._deliver(envelope.source, arrival)

    def _on_receipt(self, frames: Frames) -> None:
        with self._changed:
            self._unreceived.discard(pickle.loads(frames[0]))
            self._changed.notify_all()

    def _on_death(self, identity: str, reason: str) -> None:
        name, _, _ = identity.rpartition("#")
        group, _, rank = name.rstrip("]").rpartition("[")
        with self._changed:
            self._deaths[identity] = reason
            lost = [source for source in self._places if source[:2] == (group, int(rank))]
            waiting_for_it = [(source, place) for source in lost for place in self._places.pop(source)]
            self._changed.notify_all()
        for source, place in waiting_for_it:
            place.set_exception(self._gone(source, reason))

    def _check_source(self, ranks: Sequence[int], source: int) -> None:
        if source not in ranks:
            group = self._me.group
            raise UserError(f"{group} has ranks {', '.join(map(str, ranks))}: rank {source} cannot broadcast")

    def _count(self, route: str) -> None:
        with self._changed:
            self._routes[route] = self._routes.get(route, 0) + 1


def _take_first(lines: dict[Source, deque[T]], source: Source) -> T:
    """The first in the line of a source. An empty line goes: a tag may be used only once."""
    line = lines[source]
    first = line.popleft()
    if not line:
        del lines[source]
    return first


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
