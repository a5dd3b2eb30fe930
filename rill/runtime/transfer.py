"""Point to point: any object from any process of the run to any other, by the shortest route.

    same process      the object itself, by reference
    same node         shared memory: one copy in, none out (parcel.py)
    same GPU          CUDA IPC: one copy on the device (cuda_ipc.py)
    other node        TCP, in chunks with a bounded number in flight; the pickle encrypted, raw buffers not

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
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rill.errors import PeerDiedError, RillError, StuckError, UserError
from rill.runtime import wire
from rill.runtime.context import WorkerAddress
from rill.runtime.cuda_ipc import exporter_for
from rill.runtime.directory import Directory, remaining_s
from rill.runtime.mailbox import Frames
from rill.runtime.pending import DEFAULT_WAIT_S, FillingPending, Pending
from rill.runtime.stream import Incoming, pack_place, send_chunks, unpack_place
from rill.runtime.window import Windows

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

TRANSFER, RECEIPT, STREAM, CREDIT = b"xfer", b"rcpt", b"strm", b"cred"
_TOKEN_BYTES = 16

Source: TypeAlias = tuple[str, int, str]
"""Group, rank and tag."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What torch.distributed.init_process_group needs."""

    init_method: str
    rank: int
    world_size: int


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
        self._async_sends: deque[tuple[Pending[None], Callable[[], None]]] = deque()
        self._sender: threading.Thread | None = None
        self._routes: dict[str, int] = {}
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
        if self._async_sends:  # keep the order of what was sent before
            self.send_async(obj, group, rank, tag=tag).wait(timeout_s)
            return
        self._send(obj, group, rank, tag, time.monotonic() + timeout_s)

    def send_async(self, obj: Any, group: str, rank: int, *, tag: str = "") -> Pending[None]:
        """As `send`, from another thread; `obj` must not be changed before the result says it is sent."""
        pending: Pending[None] = Pending(f"{self._me.name}: send to {group}[{rank}]", f"{group}[{rank}]")
        deadline_s = time.monotonic() + DEFAULT_WAIT_S
        with self._changed:
            self._async_sends.append((pending, lambda: self._send(obj, group, rank, tag, deadline_s)))
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_queued, name="rill-send", daemon=True)
                self._sender.start()
            self._changed.notify_all()
        return pending

    def broadcast(
        self, obj: Any, group: str, world_size: int, *, source: int = 0, timeout_s: float = DEFAULT_WAIT_S
    ) -> Any:
        """Called by every rank of `group`; gives each what rank `source` gave. Written once per node."""
        if not 0 <= source < world_size:
            raise UserError(f"{group} has ranks 0 to {world_size - 1}: rank {source} cannot broadcast")
        if self._me.group != group:
            raise UserError(
                f"{self._me.name} is not in {group}: only its own ranks take part in its broadcast"
            )
        if self._me.rank != source:
            return self.recv(group, source, tag=_BROADCAST, timeout_s=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        peers = [
            self._directory.find(group, rank, remaining_s(deadline_s))
            for rank in range(world_size)
            if rank != source
        ]
        encoded = wire.encode(obj)
        near = [peer for peer in peers if peer.node_id == self._context.node_id]
        for peer in peers:
            self._windows.enter(peer, encoded.num_bytes, deadline_s)
        if near:
            frames = self._context.parcels.pack(encoded, near)
            for peer in near:
                self._post(peer, _BROADCAST, encoded.num_bytes, frames)
        for peer in peers:
            if peer.node_id != self._context.node_id:
                self._stream(peer, _BROADCAST, encoded, deadline_s)
        return obj

    def _send(self, obj: Any, group: str, rank: int, tag: str, deadline_s: float) -> None:
        if (group, rank) == (self._me.group, self._me.rank):
            self._count("reference")
            self._deliver((group, rank, tag), lambda: obj)
            return
        peer = self._directory.find(group, rank, remaining_s(deadline_s))
        near = peer.node_id == self._context.node_id
        exporter = exporter_for(self._me, peer)
        encoded = wire.encode(obj, device_hook=exporter.export if exporter is not None else None)
        self._windows.enter(peer, encoded.num_bytes, deadline_s)
        if not near and encoded.num_bytes > CHUNK_MIN_BYTES:
            self._stream(peer, tag, encoded, deadline_s)
            return
        self._post(peer, tag, encoded.num_bytes, self._context.parcels.pack(encoded, [peer]))
        if exporter is not None and exporter.num_exported:
            self._count("cuda_ipc")
            self._windows.wait_empty(peer, deadline_s)  # the receiver copies out of our device memory

    def _post(self, peer: WorkerAddress, tag: str, num_bytes: int, frames: Frames) -> None:
        self._count("shared_memory" if frames[0] else "message")
        meta = (self._me.group, self._me.rank, tag, self._me.identity, self._reply_endpoint(peer), num_bytes)
        endpoint = peer.endpoint_from(self._context.node_id)
        self._context.mailbox.post(endpoint, [TRANSFER, pickle.dumps(meta), *frames])

    def _stream(self, peer: WorkerAddress, tag: str, encoded: wire.Encoded, deadline_s: float) -> None:
        self._count("tcp")
        token = secrets.token_bytes(_TOKEN_BYTES)
        sizes = [buffer.nbytes for buffer in encoded.buffers]
        meta = (
            self._me.group,
            self._me.rank,
            tag,
            self._me.identity,
            self._reply_endpoint(peer),
            encoded.num_bytes,
        )
        endpoint = peer.endpoint_from(self._context.node_id)
        # Chunks take another connection: they may go once the receiver knows their token.
        self._windows.take_credit(peer, deadline_s)
        self._context.mailbox.post(endpoint, [STREAM, pickle.dumps((token, meta, sizes)), encoded.header])
        self._windows.wait_all_credits(peer, deadline_s)

        def post_chunk(index: int, offset: int, chunk: memoryview) -> None:
            self._windows.take_credit(peer, deadline_s)
            self._context.mailbox.post_raw(peer.raw_endpoint, [token, pack_place(index, offset), chunk])

        send_chunks(encoded.buffers, post_chunk)
        self._windows.wait_all_credits(peer, deadline_s)  # the chunks were views of the caller's memory

    def _send_queued(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._async_sends))
                pending, send = self._async_sends[0]
            try:
                send()
            except RillError as error:
                pending.fail(error)
            else:
                pending.fulfil(lambda: None)
            with self._changed:
                self._async_sends.popleft()

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
                pending.fulfil(arrivals.popleft())
                return pending
            self._posted.setdefault(source, deque()).append(pending)
        # Asked outside the lock, because it may ask the hub; a later death finds the pending in the line.
        death = self._directory.death_of(group, rank)
        if death is not None and self._withdraw(source, pending):
            pending.fail(PeerDiedError(f"{pending.what}: {group}[{rank}] is gone: {death}"))
        return pending

    def rendezvous(self, group: str, rank: int, world_size: int, *, timeout_s: float) -> Rendezvous:
        """Rank 0 picks a free port on its node and tells the others."""
        endpoint = f"tcp://{self._context.host}:{free_port(self._context.host)}" if rank == 0 else ""
        if world_size > 1:
            endpoint = self.broadcast(endpoint, group, world_size, timeout_s=timeout_s)
        return Rendezvous(endpoint, rank, world_size)

    def routes(self) -> dict[str, int]:
        """How many objects this process sent by each route."""
        with self._changed:
            return dict(self._routes)

    def close(self) -> None:
        """End every wait; the process ends."""
        with self._changed:
            posted = [pending for line in self._posted.values() for pending in line]
            self._posted.clear()
        for pending in posted:
            pending.fail(PeerDiedError(f"{pending.what}: this worker is closing"))

    def _deliver(self, source: Source, open_value: Callable[[], Any]) -> None:
        with self._changed:
            line = self._posted.get(source)
            if line:
                line.popleft().fulfil(open_value)
            else:
                self._arrivals.setdefault(source, deque()).append(open_value)

    def _withdraw(self, source: Source, pending: Pending[Any]) -> bool:
        with self._changed:
            line = self._posted.get(source)
            if line and pending in line:
                line.remove(pending)
                return True
            return False

    # --- events, on the inbox thread --------------------------------------------------------------------------

    def _on_transfer(self, frames: Frames) -> None:
        group, rank, tag, _, reply_endpoint, num_bytes = pickle.loads(frames[0])

        def open_value() -> Any:
            value = self._context.parcels.unpack(frames[1:], device=self._context.torch_device)
            self._send_receipt(reply_endpoint, num_bytes)
            return value

        self._deliver((group, rank, tag), open_value)

    def _send_receipt(self, endpoint: str, num_bytes: int) -> None:
        self._context.mailbox.post(endpoint, [RECEIPT, pickle.dumps((self._me.identity, num_bytes))])

    def _on_receipt(self, frames: Frames) -> None:
        self._windows.received(*pickle.loads(frames[0]))

    def _on_stream(self, frames: Frames) -> None:
        token, meta, sizes = pickle.loads(frames[0])
        self._streams[token] = Incoming(meta, bytes(frames[1]), sizes)
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
        self._context.mailbox.post(incoming.meta[4], [CREDIT, pickle.dumps(self._me.identity)])
        if incoming.is_complete:
            del self._streams[token]
            self._deliver(incoming.meta[:3], lambda: self._open_stream(incoming))

    def _open_stream(self, incoming: Incoming) -> Any:
        value = wire.decode(incoming.header, incoming.buffers, device=self._context.torch_device)
        self._send_receipt(incoming.meta[4], incoming.meta[5])
        return value

    def _on_credit(self, frames: Frames) -> None:
        self._windows.credited(pickle.loads(frames[0]))

    def _on_death(self, identity: str, reason: str) -> None:
        name, _, _ = identity.rpartition("#")
        group, _, rank = name.rstrip("]").rpartition("[")
        self._windows.peer_died(identity, reason)
        with self._changed:
            lost = [source for source in self._posted if source[:2] == (group, int(rank))]
            waiting = [pending for source in lost for pending in self._posted.pop(source)]
            for token in [token for token, stream in self._streams.items() if stream.meta[3] == identity]:
                del self._streams[token]
            self._changed.notify_all()
        for pending in waiting:
            pending.fail(PeerDiedError(f"{pending.what}: {name} is gone: {reason}"))

    def _reply_endpoint(self, peer: WorkerAddress) -> str:
        return self._me.endpoint_from(peer.node_id)

    def _count(self, route: str) -> None:
        with self._changed:
            self._routes[route] = self._routes.get(route, 0) + 1


CHUNK_MIN_BYTES = 1024 * 1024
_BROADCAST = "\0broadcast"


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
