"""Messages between the processes of a run: ZeroMQ push and pull, one inbox per process.

    any thread ──post()──▶ PUSH (one per peer, under its lock) ──ipc | tcp──▶ PULL ──▶ inbox thread ──▶ handlers

A worker has a second inbox, `work`, which its main thread reads by itself: calls then run without a hop between
threads. Messages from one process to one inbox arrive in order. The first frame names the handler; handlers run
on the inbox thread and must not block.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq

Frames: TypeAlias = list[Any]
Handler: TypeAlias = Callable[[Frames], None]

CLOSE_LINGER_MS = 500

_log = logging.getLogger(__name__)


class Mailbox:
    """The inbox of this process and its connections to others."""

    def __init__(self, endpoint: str, *, tcp_host: str | None = None) -> None:
        """Bind `endpoint`, and a free TCP port on `tcp_host` when other nodes must reach this process."""
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8192)
        self.endpoint = endpoint
        self._inbox = self.context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(endpoint)
        self.tcp_endpoint = bind_tcp(self._inbox, tcp_host) if tcp_host else ""
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

    def start(self) -> None:
        """Begin to read; handlers are in place."""
        self._thread.start()

    def post(self, endpoint: str, frames: Sequence[Any], *, copy: bool = True) -> None:
        """Send without waiting. To a peer that is gone it does nothing: its death is reported elsewhere.

        copy=False lends the frames' memory to ZeroMQ until they are sent: the caller must not change it.
        """
        peer = self._peers.get(endpoint) or self._connect(endpoint)
        if peer is not None:
            peer.send(frames, copy)

    def forget(self, endpoint: str) -> None:
        """Drop the connection to a peer that is gone, and what is queued for it or still posted to it."""
        with self._peers_lock:
            peer = self._peers.pop(endpoint, None)
            if endpoint.startswith("ipc:"):  # a path is used once in a session; a TCP port may come back
                self._gone.add(endpoint)
        if peer is not None:
            peer.close(linger_ms=0)

    def connections(self) -> list[str]:
        """The endpoints this process is connected to."""
        with self._peers_lock:
            return sorted(self._peers)

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
            self._inbox.close(linger=0)
        for peer in peers:
            peer.close(linger_ms=CLOSE_LINGER_MS)
        self._stop.close(linger=0)
        if self._thread is not threading.current_thread():
            self.context.term()

    def _connect(self, endpoint: str) -> _Peer | None:
        with self._peers_lock:
            if self._closed or endpoint in self._gone:
                return None
            if endpoint not in self._peers:
                self._peers[endpoint] = _Peer(self.context, endpoint)
            return self._peers[endpoint]

    def _read(self) -> None:
        stop = self.context.socket(zmq.PAIR)
        stop.connect(self._stop_endpoint)
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    return
                # Drain before polling again: under load most messages then cost no poll.
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._dispatch(receive(self._inbox, zmq.NOBLOCK))
        except zmq.ContextTerminated:
            return
        finally:
            stop.close(linger=0)
            self._inbox.close(linger=0)

    def _dispatch(self, frames: Frames) -> None:
        handler = self._handlers.get(bytes(frames[0]))
        if handler is None:
            _log.warning("a message of unknown kind %r was dropped", bytes(frames[0]))
            return
        try:
            handler(frames[1:])
        except Exception:  # noqa: BLE001  the inbox thread serves everybody: one bad message must not end it
            _log.exception("the handler of a %r message failed", bytes(frames[0]))


class _Peer:
    """One PUSH socket; ZeroMQ sockets may be used by one thread at a time, hence the lock."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
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


def bind_tcp(socket: zmq.Socket[Any], host: str) -> str:
    """Bind a free port and return the endpoint others connect to."""
    port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"
