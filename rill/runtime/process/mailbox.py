"""Messages between the processes of a run: ZeroMQ push and pull, one inbox per process.

    any thread ──post()──▶ PUSH (one per peer, under its lock) ──ipc | tcp──▶ PULL ──▶ inbox thread ──▶ handlers
    any thread ──post_raw()──▶ PUSH ──tcp, in the clear──▶ PULL ──▶ inbox thread ──▶ the one handler of raw bytes

Ranks that share a process share its inbox: "endpoint#5" is rank 5's door of the inbox at "endpoint" (`Door`).
A worker has a second inbox, `work`, which its main thread reads by itself: calls then run without a hop between
threads. Messages from one process to one inbox arrive in order. The first frame names the handler; handlers run
on the inbox thread and must not block.

Between nodes messages are encrypted and only holders of the session's key get in (session_key.py). Raw bytes have an
entry of their own, without encryption: what arrives there is never unpickled, and its handler must check it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import zmq

from rill.errors import RunError
from rill.runtime.process.session_key import SessionKey

Frames: TypeAlias = list[Any]
Handler: TypeAlias = Callable[[Frames], None]

CLOSE_LINGER_MS = 500
MAX_RAW_BYTES = 8 * 1024 * 1024

_log = logging.getLogger(__name__)


class Inbox(Protocol):
    """What arrives for one rank, and the way out: a process's mailbox, or one rank's door of it."""

    endpoint: str
    tcp_endpoint: str
    raw_endpoint: str

    def on(self, kind: bytes, handler: Handler) -> None: ...
    def on_raw(self, handler: Handler) -> None: ...
    def post(self, endpoint: str, frames: Sequence[Any], *, copy: bool = True) -> None: ...
    def post_raw(self, endpoint: str, frames: Sequence[Any]) -> None: ...
    def forget(self, endpoint: str) -> None: ...


class Mailbox:
    """The inbox of this process and its connections to others."""

    def __init__(self, endpoint: str, *, tcp_host: str | None = None, key: SessionKey | None = None) -> None:
        """Bind `endpoint`, and free TCP ports on `tcp_host` when other nodes must reach this process."""
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8192)
        self.endpoint = endpoint
        self._inbox = self.context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(endpoint)
        self._key = key
        self.tcp_endpoint = self.raw_endpoint = ""
        self._raw_inbox: zmq.Socket[bytes] | None = None
        if tcp_host:
            self.tcp_endpoint = bind_tcp(self._inbox, tcp_host, key)
            self._raw_inbox = self.context.socket(zmq.PULL)
            self._raw_inbox.setsockopt(zmq.MAXMSGSIZE, MAX_RAW_BYTES)
            self._raw_inbox.setsockopt(zmq.RCVHWM, 64)  # frames; more wait at the sender
            self.raw_endpoint = bind_raw_tcp(self._raw_inbox, tcp_host)
        self._raw_handlers: list[Handler] = []
        self._handlers: dict[bytes, Handler] = {}
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.Lock()
        self._gone: set[str] = set()
        self._closed = False
        self._stop_endpoint = f"inproc://stop-{id(self)}"
        self._stop = self.context.socket(zmq.PAIR)
        self._stop.bind(self._stop_endpoint)
        self._thread = threading.Thread(target=self._read, name="rill-inbox", daemon=True)

    def on(self, kind: bytes, handler: Handler) -> None:
        """Send messages whose first frame is `kind` to `handler`, with the frames after it."""
        self._handlers[kind] = handler

    def on_raw(self, handler: Handler) -> None:
        """Send what arrives in the clear to `handler`, which knows what is meant for it: anybody may have made it."""
        self._raw_handlers.append(handler)

    def door(self, rank: int) -> Door:
        """An inbox of its own for a rank that shares this process."""
        return Door(self, rank)

    def start(self) -> None:
        """Begin to read; handlers are in place."""
        self._thread.start()

    def post(self, endpoint: str, frames: Sequence[Any], *, copy: bool = True) -> None:
        """Send without waiting. To a peer that is gone it does nothing: its death is reported elsewhere.

        copy=False lends the frames' memory to ZeroMQ until they are sent: the caller must not change it.
        """
        endpoint, _, rank = endpoint.partition("#")
        if rank:
            frames = [_kind_at(frames[0], rank), *frames[1:]]
        peer = self._peers.get(endpoint) or self._connect(endpoint)
        if peer is not None:
            peer.send(frames, copy)

    def post_raw(self, endpoint: str, frames: Sequence[Any]) -> None:
        """Send in the clear to another process's `raw_endpoint`; lends the frames' memory as `post(copy=False)`."""
        peer = self._peers.get(endpoint) or self._connect(endpoint, is_raw=True)
        if peer is not None:
            peer.send(frames, copy=False)

    def forget(self, endpoint: str) -> None:
        """Drop the connection to a peer that is gone, and what is queued for it or still posted to it."""
        endpoint = endpoint.partition("#")[0]
        with self._peers_lock:
            peer = self._peers.pop(endpoint, None)
            if endpoint.startswith("ipc:"):  # a path is used once in a session; a TCP port may come back
                self._gone.add(endpoint)
        if peer is not None:
            peer.close(linger_ms=0)

    def close(self) -> None:
        """Stop reading, flush what was posted, close. Safe to call twice."""
        with self._peers_lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join(5.0)
        else:
            self._close_inboxes()
        for peer in peers:
            peer.close(linger_ms=CLOSE_LINGER_MS)
        self._stop.close(linger=0)
        if self._thread is not threading.current_thread():
            self.context.term()

    def _connect(self, endpoint: str, *, is_raw: bool = False) -> _Peer | None:
        with self._peers_lock:
            if self._closed or endpoint in self._gone:
                return None
            if endpoint not in self._peers:
                is_near = endpoint.startswith("ipc:")
                self._peers[endpoint] = _Peer(
                    self.context, endpoint, None if is_raw or is_near else self._key
                )
            return self._peers[endpoint]

    def _read(self) -> None:
        stop = self.context.socket(zmq.PAIR)
        stop.connect(self._stop_endpoint)
        poller = zmq.Poller()
        for socket in (self._inbox, self._raw_inbox, stop):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    return
                # Drain before polling again: under load most messages then cost no poll.
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._dispatch(receive(self._inbox, zmq.NOBLOCK))
                if self._raw_inbox is not None and self._raw_inbox in ready:
                    frames = receive(self._raw_inbox)
                    for handler in self._raw_handlers:
                        self._guarded(handler, frames, "raw")
        except zmq.ContextTerminated:
            return
        finally:
            stop.close(linger=0)
            self._close_inboxes()

    def _close_inboxes(self) -> None:
        self._inbox.close(linger=0)
        if self._raw_inbox is not None:
            self._raw_inbox.close(linger=0)

    def _dispatch(self, frames: Frames) -> None:
        handler = self._handlers.get(bytes(frames[0]))
        if handler is None:
            _log.warning("a message of unknown kind %r was dropped", bytes(frames[0]))
            return
        self._guarded(handler, frames[1:], bytes(frames[0]).decode(errors="replace"))

    def _guarded(self, handler: Handler, frames: Frames, kind: str) -> None:
        try:
            handler(frames)
        except Exception:  # noqa: BLE001  the inbox thread serves everybody: one bad message must not end it
            _log.exception("the handler of a %r message failed", kind)


class Door:
    """One rank's inbox where several ranks share a process."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self._rank = str(rank)
        self.endpoint = f"{mailbox.endpoint}#{rank}"
        self.tcp_endpoint = f"{mailbox.tcp_endpoint}#{rank}" if mailbox.tcp_endpoint else ""
        self.raw_endpoint = mailbox.raw_endpoint
        self.on_raw = mailbox.on_raw
        self.post = mailbox.post
        self.post_raw = mailbox.post_raw
        self.forget = mailbox.forget

    def on(self, kind: bytes, handler: Handler) -> None:
        self._mailbox.on(_kind_at(kind, self._rank), handler)


def _kind_at(kind: bytes, rank: str) -> bytes:
    return b"%b#%b" % (kind, rank.encode())


class _Peer:
    """One PUSH socket; ZeroMQ sockets may be used by one thread at a time, hence the lock."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, key: SessionKey | None) -> None:
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if key is not None:
            key.present(self._socket)
        self._socket.connect(endpoint)

    def send(self, frames: Sequence[Any], copy: bool) -> None:
        with self._lock:
            if not self._socket.closed:
                self._socket.send_multipart(frames, copy=copy)

    def close(self, linger_ms: int) -> None:
        with self._lock:
            self._socket.close(linger=linger_ms)


LARGE_FRAME_BYTES = 65536


def receive(socket: zmq.Socket[Any], flags: int = 0) -> Frames:
    """One message. Large frames come as writable memory of their own, without a copy by Python."""
    frames: Frames = []
    while True:
        frame = socket.recv(flags, copy=False)
        frames.append(frame.bytes if len(frame) < LARGE_FRAME_BYTES else frame.buffer)
        if not frame.more:
            return frames
        flags = 0  # the parts of one message arrive together


def bind_tcp(socket: zmq.Socket[Any], host: str, key: SessionKey | None) -> str:
    """Bind a free port that only holders of `key` can use; returns the endpoint they connect to."""
    if key is None:
        raise RunError(f"a port on {host} that other nodes can reach needs a session key")
    key.guard(socket)
    return bind_raw_tcp(socket, host)


def bind_raw_tcp(socket: zmq.Socket[Any], host: str) -> str:
    """Bind a free port that anybody can send to."""
    port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"
