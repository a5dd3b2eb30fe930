"""Messages between the processes of a run: one mailbox per process, one path for calls, answers and everything else.

    any thread ──post()──▶ Peer ──┬─ same node: Unix socket (unix_line.py) ─┬──▶ inbox thread ──▶ handlers
                                  └─ other node: ZeroMQ PUSH ──tcp──▶ PULL ─┘

Messages from one process to another arrive once and in order, also when the connection between them breaks (peer.py).
The first frame names the handler; handlers run on the inbox thread and must not block. Between nodes messages are
encrypted and only holders of the session's key get in.
"""

from __future__ import annotations

import logging
import socket as sockets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import zmq

from rill.runtime.process.peer import CLOSE_LINGER_MS, PROBE, WORD, Letter, Peer, TcpLine
from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.unix_line import UnixLine, UnixSockets

Frames: TypeAlias = list[Any]
Handler: TypeAlias = Callable[[str, Frames], None]

_TICK_S = 0.5
_LOCAL = "ipc://"
_MAX_READS = 64
"""Of TCP in one turn: the neighbours wait."""

_log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Letter).decode


class Mailbox:
    def __init__(self, endpoint: str, *, host: str = "127.0.0.1", key: SessionKey | None = None) -> None:
        """Bind `endpoint`, and with a key also a free TCP port on `host`, where holders of the key get in."""
        self.endpoint = endpoint
        self._unix = UnixSockets(endpoint.removeprefix(_LOCAL), self._take)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._key = key
        self._tcp: zmq.Socket[bytes] | None = None
        self.tcp_endpoint = ""
        if key is not None:
            self._tcp = self._context.socket(zmq.PULL)
            self._tcp.setsockopt(zmq.RCVHWM, 0)
            key.guard(self._tcp)
            self.tcp_endpoint = f"tcp://{host}:{self._tcp.bind_to_random_port(f'tcp://{host}')}"
            self._unix.watch(self._tcp.FD, self._read_tcp)
        self._has_more = False
        """More has come by TCP than was read in the last turn."""
        self._handlers: dict[bytes, Handler] = {}
        self._peers: dict[str, Peer] = {}
        self._by_token: dict[bytes, Peer] = {}
        self._peers_lock = threading.Lock()
        self._gone: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="rill-inbox", daemon=True)

    def on(self, kind: bytes, handler: Handler) -> None:
        """Give messages whose first frame is `kind` to `handler`: the sender's mailbox, and the frames after it."""
        self._handlers[kind] = handler

    def start(self) -> None:
        self._thread.start()

    def post(self, endpoint: str, frames: Sequence[Any]) -> None:
        """Send without waiting; the frames may be changed afterwards. To a peer that is gone it does nothing: its
        death is reported elsewhere."""
        peer = self._peers.get(endpoint) or self._peer(endpoint)
        if peer is not None:
            peer.send(frames)

    def forget(self, endpoint: str) -> None:
        """Drop the connection to a peer that is gone, and what is queued for it or still posted to it."""
        with self._peers_lock:
            peer = self._peers.pop(endpoint, None)
            if peer is not None:
                self._by_token.pop(peer.token, None)
            if endpoint.startswith(_LOCAL):  # a path is used once in a session; a TCP port may come back
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
            self._unix.wake()
            self._thread.join(5.0)
        if self._tcp is not None:
            self._unix.unwatch(self._tcp.FD)
        self._unix.drain(CLOSE_LINGER_MS / 1000)
        for peer in peers:
            peer.close(linger_ms=CLOSE_LINGER_MS)
        self._unix.close()
        self._context.destroy(CLOSE_LINGER_MS)

    def _peer(self, endpoint: str) -> Peer | None:
        """None: it is gone, it has no address here, or this mailbox is closed."""
        with self._peers_lock:
            if self._closed or not endpoint or endpoint in self._gone:
                return None
            if endpoint not in self._peers:
                if endpoint.startswith(_LOCAL):
                    peer = Peer(UnixLine(self._unix, endpoint.removeprefix(_LOCAL)), self.endpoint)
                else:
                    peer = Peer(TcpLine(self._context, endpoint, self._key), self.tcp_endpoint)
                self._peers[endpoint] = peer
                self._by_token[peer.token] = peer
            return self._peers[endpoint]

    # --- the inbox thread ---------------------------------------------------------------------------------

    def _read(self) -> None:
        next_probe_s = 0.0
        while not self._closed:
            self._unix.serve(0.0 if self._has_more else _TICK_S)
            if self._has_more:
                self._read_tcp()
            now_s = time.monotonic()
            if now_s >= next_probe_s:
                next_probe_s = now_s + _TICK_S
                with self._peers_lock:
                    peers = list(self._peers.values())
                for peer in peers:
                    peer.probe(now_s)

    def _read_tcp(self) -> None:
        """Only where there is news, of which ZeroMQ tells once: a look that finds nothing costs a third of a call."""
        assert self._tcp is not None
        self._has_more = False
        for _ in range(_MAX_READS):
            try:
                data = self._tcp.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(data)
        self._has_more = True

    def _take(self, data: bytes | bytearray) -> None:
        try:
            self._handle(_decode(data))
        except msgspec.DecodeError:
            _log.warning("%d bytes that are no message were dropped", len(data))
        except Exception:  # noqa: BLE001  boundary: the inbox thread serves everybody, one bad message must not end it
            _log.exception("a message could not be handled")

    def _handle(self, letter: Letter) -> None:
        confirmed = self._by_token.get(letter.ack_token)
        if confirmed is not None:
            confirmed.confirm(letter)
        if letter.seq == WORD:
            return
        peer = self._peers.get(letter.reply_to) or self._peer(letter.reply_to)
        if peer is None:
            return  # gone: what it still says is of no use to anybody
        if peer.is_next(letter):
            kind, *frames = letter.frames
            handler = self._handlers.get(kind)
            if handler is None:
                _log.warning("a message of unknown kind %r was dropped", kind)
            else:
                handler(letter.reply_to, frames)
            peer.tell()
        elif letter.seq == PROBE:
            peer.tell(letter.asked)


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at the moment."""
    with sockets.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
