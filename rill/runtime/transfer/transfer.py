"""Point to point: any object from any process of the run to any other, by the shortest route (routes.py has the table).

    same node         shared memory: one copy in, none out (parcel.py)
    other node        TCP, in chunks with a bounded number in flight; the pickle encrypted, raw buffers not (stream.py)
    GPU tensors       CUDA IPC (cuda_ipc.py) or NCCL (device_link.py), beside the rest of their object

    send ──▶ window (WINDOW_BYTES unreceived per peer) ──▶ peer's inbox ──▶ arrivals by (group, rank, tag) ──▶ recv
                 ▲                                                                                            │
                 └────────────────────────────── receipt ◀────────────────────────────────────────────────────┘

Objects from one peer with one tag arrive in the order they were sent. A send returns when the object may be changed
again; it waits while the peer is behind by more than the window. A peer's death ends every wait on it with an error
that names it; what it had sent and nobody had received may be lost. Connections are made at first use and dropped
when the peer ends.
"""

from __future__ import annotations

import pickle
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rill.errors import PeerDiedError, RillError, RunError, StuckError
from rill.runtime.context import WorkerAddress
from rill.runtime.process.directory import Directory, remaining_s
from rill.runtime.process.mailbox import Frames
from rill.runtime.transfer import wire
from rill.runtime.transfer.cuda_ipc import Exporter
from rill.runtime.transfer.device_link import DeviceLinks, Offer, arrived
from rill.runtime.transfer.lanes import Lanes
from rill.runtime.transfer.pending import DEFAULT_WAIT_S, FillingPending, Pending
from rill.runtime.transfer.routes import TensorRoute, tensor_route
from rill.runtime.transfer.stream import Envelope, Incoming, Source, pack_place, send_chunks, unpack_place
from rill.runtime.transfer.window import Windows

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

T = TypeVar("T")

TRANSFER, RECEIPT, STREAM, CREDIT = b"xfer", b"rcpt", b"strm", b"cred"
_TOKEN_BYTES = 16
_CHUNK_MIN_BYTES = 1024 * 1024
"""Smaller objects go to another node as one message, encrypted whole."""


class Transfer:
    """This process's end of every transfer. Thread-safe."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._me = context.address
        self._directory: Directory = context.directory
        self._changed = threading.Condition()
        self._arrivals: dict[Source, deque[Callable[[], Any]]] = {}
        self._posted: dict[Source, deque[Pending[Any]]] = {}
        self._windows = Windows(self._me.name)
        self._streams: dict[bytes, Incoming] = {}
        """By the token that the sender announced and every chunk must show."""
        self._lanes = Lanes("rill-send")
        """Asynchronous sends: one lane for each receiver and tag, so that they wait for nobody but themselves."""
        self._routes: dict[str, int] = {}
        self.links = DeviceLinks(context, on_refusal=self._windows.refused)
        for kind, handler in (
            (TRANSFER, self._on_transfer),
            (RECEIPT, self._on_receipt),
            (STREAM, self._on_stream),
            (CREDIT, self._on_credit),
        ):
            context.mailbox.on(kind, handler)
        context.mailbox.on_raw(self._on_chunk)
        self._directory.on_death(self._on_death)

    # --- sending ------------------------------------------------------------------------------------------

    def send(
        self, obj: Any, group: str, rank: int, *, tag: str = "", timeout_s: float = DEFAULT_WAIT_S
    ) -> None:
        """Send `obj`; returns when it may be changed again."""
        if self._lanes.is_busy((group, rank, tag)):  # keep the order of what was sent before
            self.send_async(obj, group, rank, tag=tag).wait(timeout_s)
            return
        self._send(obj, group, rank, tag, time.monotonic() + timeout_s)

    def send_async(self, obj: Any, group: str, rank: int, *, tag: str = "") -> Pending[None]:
        """As `send`, from another thread; `obj` must not be changed before the result says it is sent."""
        peer = f"{group}[{rank}]"
        deadline_s = time.monotonic() + DEFAULT_WAIT_S
        return self.later(
            (group, rank, tag),
            f"send to {peer}",
            peer,
            lambda: self._send(obj, group, rank, tag, deadline_s),
        )

    def send_to_all(self, obj: Any, targets: Sequence[tuple[str, int]], tag: str, timeout_s: float) -> None:
        """One object to several workers: written once per node. GPU tensors go to each by its own route."""
        deadline_s = time.monotonic() + timeout_s
        peers = [self._directory.find(group, rank, remaining_s(deadline_s)) for group, rank in targets]
        probe = _Probe(self.links.device_type)
        encoded = wire.encode(obj, device_hook=probe if any(map(self._exporter_for, peers)) else None)
        if probe.has_found:
            sending = [self.send_async(obj, group, rank, tag=tag) for group, rank in targets]
            for one in sending:
                one.wait(remaining_s(deadline_s))
            return
        envelopes = [(peer, self._envelope(peer, tag, encoded, deadline_s)) for peer in peers]
        near = [peer for peer in peers if peer.node_id == self._context.node_id]
        frames = self._context.parcels.pack(encoded, near) if near else []
        for peer, envelope in envelopes:
            if peer.node_id == self._context.node_id:
                self._post(peer, envelope, frames)
            else:
                self._stream(peer, envelope, encoded, deadline_s)

    def later(self, lane: Source, what: str, on: str, act: Callable[[], T]) -> Pending[T]:
        """Do it in a thread, after what was put into the same lane before."""
        pending: Pending[T] = Pending(f"{self._me.name}: {what}", on)

        def run() -> None:
            try:
                value = act()
            except RillError as error:
                pending.fail(error)
            except Exception as error:  # noqa: BLE001  the boundary of the thread: whoever waits raises it
                failure = RunError(f"{pending.what} failed: {error!r}")
                failure.__cause__ = error
                pending.fail(failure)
            else:
                pending.fulfil(lambda: value)

        self._lanes.submit(lane, run)
        return pending

    def is_busy(self, lane: Source) -> bool:
        """Whether something was put into the lane that has not ended yet."""
        return self._lanes.is_busy(lane)

    def _send(self, obj: Any, group: str, rank: int, tag: str, deadline_s: float) -> None:
        if (group, rank) == (self._me.group, self._me.rank):
            self._count("reference")
            self._deliver((group, rank, tag), lambda: obj)
            return
        peer = self._directory.find(group, rank, remaining_s(deadline_s))
        exporter = self._exporter_for(peer)
        encoded = wire.encode(obj, device_hook=exporter)
        envelope = self._envelope(peer, tag, encoded, deadline_s)
        if exporter is None or not exporter.num_exported:
            self._carry(peer, envelope, encoded, deadline_s)
            return
        # The receiver takes the tensors out of our device memory: what it is may change when the receipt is here.
        if isinstance(exporter, Offer):
            offer = self.links.announce(exporter, envelope.number)
            envelope = envelope._replace(offer=offer)
            try:
                self._carry(peer, envelope, encoded, deadline_s)
                self._windows.wait_received(peer, envelope.number, deadline_s)
            finally:
                self.links.withdraw(offer[0])
            self._count(self.links.backend)
        else:
            self._carry(peer, envelope, encoded, deadline_s)
            self._windows.wait_received(peer, envelope.number, deadline_s)
            self._count("cuda_ipc")

    def _exporter_for(self, peer: WorkerAddress) -> Exporter | Offer | None:
        """What takes the tensors out of an object for `peer`; None where they travel through the host."""
        if "torch" not in sys.modules:
            return None
        route = tensor_route(self._me, peer, has_link=self.links.can_reach(peer))
        if route is TensorRoute.CUDA_IPC:
            return Exporter(self._me, peer)
        return self.links.new_offer() if route is TensorRoute.NCCL else None

    def _envelope(self, peer: WorkerAddress, tag: str, encoded: wire.Encoded, deadline_s: float) -> Envelope:
        """What to write on an object, once `peer` has room for it."""
        me = self._me
        number = self._windows.enter(peer, encoded.num_bytes, deadline_s)
        return Envelope(me.group, me.rank, tag, me.identity, self._reply_endpoint(peer), number, None)

    def _carry(
        self, peer: WorkerAddress, envelope: Envelope, encoded: wire.Encoded, deadline_s: float
    ) -> None:
        if peer.node_id != self._context.node_id and encoded.num_bytes > _CHUNK_MIN_BYTES:
            self._stream(peer, envelope, encoded, deadline_s)
        else:
            self._post(peer, envelope, self._context.parcels.pack(encoded, [peer]))

    def _post(self, peer: WorkerAddress, envelope: Envelope, frames: Frames) -> None:
        self._count("shared_memory" if frames[0] else "message")
        endpoint = peer.endpoint_from(self._context.node_id)
        self._context.mailbox.post(endpoint, [TRANSFER, pickle.dumps(tuple(envelope)), *frames])

    def _stream(
        self, peer: WorkerAddress, envelope: Envelope, encoded: wire.Encoded, deadline_s: float
    ) -> None:
        self._count("tcp")
        token = secrets.token_bytes(_TOKEN_BYTES)
        sizes = [buffer.nbytes for buffer in encoded.buffers]
        endpoint = peer.endpoint_from(self._context.node_id)

        def post_chunk(index: int, offset: int, chunk: memoryview) -> None:
            self._windows.take_credit(peer, token, deadline_s)
            self._context.mailbox.post_raw(peer.raw_endpoint, [token, pack_place(index, offset), chunk])

        self._windows.begin_stream(peer, token)
        try:
            # Chunks take another connection: they may go once the receiver knows their token.
            self._windows.take_credit(peer, token, deadline_s)
            meta = pickle.dumps((token, tuple(envelope), sizes))
            self._context.mailbox.post(endpoint, [STREAM, meta, encoded.header])
            self._windows.wait_all_credits(peer, token, deadline_s)
            send_chunks(encoded.buffers, post_chunk)
            self._windows.wait_all_credits(
                peer, token, deadline_s
            )  # the chunks were views of the caller's memory
        except StuckError:
            self._windows.leave(peer, envelope.number)
            raise
        finally:
            self._windows.end_stream(peer, token)

    # --- receiving ----------------------------------------------------------------------------------------

    def recv(
        self, group: str, rank: int, *, into: Any = None, tag: str = "", timeout_s: float = DEFAULT_WAIT_S
    ) -> Any:
        """The next object from a worker; `into`: a tensor or array of the same shape and type, filled in place."""
        pending = self.recv_async(group, rank, into=into, tag=tag)
        try:
            return pending.wait(timeout_s)
        except StuckError:
            self._withdraw((group, rank, tag), pending)
            raise

    def recv_async(self, group: str, rank: int, *, into: Any = None, tag: str = "") -> Pending[Any]:
        """A place in the line for the next object from a worker."""
        pending: Pending[Any] = Pending(f"{self._me.name}: recv from {group}[{rank}]", f"{group}[{rank}]")
        source = (group, rank, tag)
        if into is not None:
            pending = FillingPending(pending.what, f"{group}[{rank}]", into)
        with self._changed:
            arrivals = self._arrivals.get(source)
            if arrivals:
                pending.fulfil(_take_first(self._arrivals, source))
                return pending
            self._posted.setdefault(source, deque()).append(pending)
        # Asked outside the lock, because it may ask the hub; a later death finds the pending in the line.
        death = self._directory.death_of(group, rank)
        if death is not None and self._withdraw(source, pending):
            pending.fail(PeerDiedError(f"{pending.what}: {group}[{rank}] is gone: {death}"))
        return pending

    def routes(self) -> dict[str, int]:
        """How many objects this process sent by each route."""
        with self._changed:
            return dict(self._routes)

    def close(self) -> None:
        """End every wait; the process ends."""
        self.links.close()
        with self._changed:
            posted = [pending for line in self._posted.values() for pending in line]
            self._posted.clear()
        for pending in posted:
            pending.fail(PeerDiedError(f"{pending.what}: this worker is closing"))

    def _deliver(self, source: Source, open_value: Callable[[], Any]) -> None:
        with self._changed:
            if source in self._posted:
                _take_first(self._posted, source).fulfil(open_value)
            else:
                self._arrivals.setdefault(source, deque()).append(open_value)

    def _withdraw(self, source: Source, pending: Pending[Any]) -> bool:
        with self._changed:
            line = self._posted.get(source)
            if line and pending in line:
                line.remove(pending)
                if not line:
                    del self._posted[source]
                return True
            return False

    # --- events, on the inbox thread --------------------------------------------------------------------------

    def _on_transfer(self, frames: Frames) -> None:
        envelope = Envelope(*pickle.loads(frames[0]))
        device = self._context.torch_device
        self._deliver(
            envelope.source,
            lambda: self._open(envelope, lambda: self._context.parcels.unpack(frames[1:], device=device)),
        )

    def _open(self, envelope: Envelope, decode: Callable[[], Any]) -> Any:
        """In the thread that receives."""
        if envelope.offer is None:
            value = decode()
        else:
            with arrived(self.links.pull(envelope.identity, envelope.reply_to, envelope.offer)):
                value = decode()
        receipt = pickle.dumps((self._me.identity, envelope.number))
        self._context.mailbox.post(envelope.reply_to, [RECEIPT, receipt])
        return value

    def _on_receipt(self, frames: Frames) -> None:
        self._windows.received(*pickle.loads(frames[0]))

    def _on_stream(self, frames: Frames) -> None:
        token, envelope, sizes = pickle.loads(frames[0])
        self._streams[token] = Incoming(Envelope(*envelope), bytes(frames[1]), sizes)
        self._after_chunk(token)

    def _on_chunk(self, frames: Frames) -> None:
        """Comes in the clear, from anybody: without a token that was announced it is nothing."""
        token = bytes(frames[0])
        if len(frames) != 3 or token not in self._streams:
            return
        self._streams[token].take(*unpack_place(bytes(frames[1])), memoryview(frames[2]))
        self._after_chunk(token)

    def _after_chunk(self, token: bytes) -> None:
        incoming = self._streams[token]
        envelope = incoming.envelope
        self._context.mailbox.post(envelope.reply_to, [CREDIT, pickle.dumps((self._me.identity, token))])
        if incoming.is_complete:
            del self._streams[token]
            device = self._context.torch_device
            self._deliver(
                envelope.source,
                lambda: self._open(
                    envelope, lambda: wire.decode(incoming.header, incoming.buffers, device=device)
                ),
            )

    def _on_credit(self, frames: Frames) -> None:
        self._windows.credited(*pickle.loads(frames[0]))

    def _on_death(self, identity: str, reason: str) -> None:
        name, _, _ = identity.rpartition("#")
        group, _, rank = name.rstrip("]").rpartition("[")
        self._windows.peer_died(identity, reason)
        with self._changed:
            lost = [source for source in self._posted if source[:2] == (group, int(rank))]
            waiting = [pending for source in lost for pending in self._posted.pop(source)]
            self._streams = {
                token: stream
                for token, stream in self._streams.items()
                if stream.envelope.identity != identity
            }
            self._changed.notify_all()
        for pending in waiting:
            pending.fail(PeerDiedError(f"{pending.what}: {name} is gone: {reason}"))

    def _reply_endpoint(self, peer: WorkerAddress) -> str:
        return self._me.endpoint_from(peer.node_id)

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


class _Probe:
    """A device hook that only looks whether there is something for it."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.has_found = False

    def __call__(self, tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
        if tensor.device.type != self._device_type:
            return None
        self.has_found = True
        return tuple, ()
