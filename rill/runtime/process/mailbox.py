"""Messages between the processes of a run: one mailbox per process, one path for calls, answers and everything else.

    any thread ──post()──▶ PUSH (one per peer, under its lock) ──ipc | tcp──▶ PULL ──▶ inbox thread ──▶ handlers

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

from rill.runtime.process.peer import CLOSE_LINGER_MS, PROBE, WORD, Letter, Peer
from rill.runtime.process.session_key import SessionKey

Frames: TypeAlias = list[Any]
Handler: TypeAlias = Callable[[str, Frames], None]

_TICK_MS = 500

_log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Letter).decode


class Mailbox:
    def __init__(self, endpoint: str, *, host: str = "127.0.0.1", key: SessionKey | None = None) -> None:
        """Bind `endpoint`, and with a key also a free TCP port on `host`, where holders of the key get in."""
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8192)
        self.endpoint = endpoint
        self._inbox = self.context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(endpoint)
        self._key = key
        self.tcp_endpoint = ""
        if key is not None:
            key.guard(self._inbox)
            self.tcp_endpoint = f"tcp://{host}:{self._inbox.bind_to_random_port(f'tcp://{host}')}"
        self._handlers: dict[bytes, Handler] = {}
        self._peers: dict[str, Peer] = {}
        self._by_token: dict[bytes, Peer] = {}
        self._peers_lock = threading.Lock()
        self._gone: set[str] = set()
        self._closed = False
        self._stop_endpoint = f"inproc://stop-{id(self)}"
        self._inbox.bind(self._stop_endpoint)
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
            with self.context.socket(zmq.PUSH) as stop:
                stop.connect(self._stop_endpoint)
                stop.send(b"")
            self._thread.join(5.0)
        self._inbox.close(linger=0)
        for peer in peers:
            peer.close(linger_ms=CLOSE_LINGER_MS)
        self.context.term()

    def _peer(self, endpoint: str) -> Peer | None:
        """None: it is gone, it has no address here, or this mailbox is closed."""
        with self._peers_lock:
            if self._closed or not endpoint or endpoint in self._gone:
                return None
            if endpoint not in self._peers:
                reply_to = self.endpoint if endpoint.startswith("ipc:") else self.tcp_endpoint
                peer = self._peers[endpoint] = Peer(self.context, endpoint, reply_to, self._key)
                self._by_token[peer.token] = peer
            return self._peers[endpoint]

    # --- the inbox thread ---------------------------------------------------------------------------------

    def _read(self) -> None:
        self._inbox.setsockopt(zmq.RCVTIMEO, _TICK_MS)
        next_probe_s = 0.0
        while not self._closed:
            try:
                self._take(self._inbox.recv())
            except zmq.Again:
                pass
            except zmq.ZMQError:  # closed
                return
            now_s = time.monotonic()
            if now_s >= next_probe_s:
                next_probe_s = now_s + _TICK_MS / 1000
                with self._peers_lock:
                    peers = list(self._peers.values())
                for peer in peers:
                    peer.probe(now_s)

    def _take(self, data: bytes) -> None:
        try:
            letter = _decode(data)
        except msgspec.DecodeError:
            if not self._closed:
                _log.warning("%d bytes that are no message were dropped", len(data))
            return
        confirmed = self._by_token.get(letter.ack_token)
        if confirmed is not None:
            confirmed.confirm(letter)
        if letter.seq == WORD:
            return
        peer = self._peers.get(letter.reply_to) or self._peer(letter.reply_to)
        if peer is None:
            return  # gone: what it still says is of no use to anybody
        if peer.is_next(letter):
            self._dispatch(letter.reply_to, letter.frames)
            peer.tell()
        elif letter.seq == PROBE:
            peer.tell(letter.asked)

    def _dispatch(self, sender: str, frames: Frames) -> None:
        handler = self._handlers.get(frames[0])
        if handler is None:
            _log.warning("a message of unknown kind %r was dropped", frames[0])
            return
        try:
            handler(sender, frames[1:])
        except Exception:  # noqa: BLE001  boundary: the inbox thread serves everybody, one bad message must not end it
            _log.exception("the handler of a %r message failed", frames[0])


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at the moment."""
    with sockets.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
