"""Another mailbox, as this one sees it: messages arrive once and in order, whatever becomes of the connection below.

    sender                                        receiver
    seq 1, 2, 3 … kept until confirmed ─────────▶ takes seq = received + 1, drops everything else
           ◀── "I have m" in every message the other way, else after ACK_EVERY messages
    no word for PROBE_S: "do you have n?" ──────▶ "I have m, you asked for n"; where m < n, all of it goes out again

A probe passes behind everything that was sent before it, so a receiver that is only busy is asked and never flooded. A
stream's random token tells it from that of an earlier process at the same address.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.unix_line import UnixLine

PROBE_S = 1.0
ACK_EVERY = 64
CLOSE_LINGER_MS = 500
HEARTBEAT_MS = 10_000
"""ZeroMQ's own, from its own threads: a connection that leads nowhere is closed and made anew."""

WORD, PROBE = 0, -1
"""In the place of a number: messages that are not counted."""


class Letter(msgspec.Struct, array_like=True, gc=False):
    token: bytes
    """Of the sender's stream."""
    ack_token: bytes
    """Of the receiver's stream the other way."""
    ack: int
    """How many messages of it the sender has."""
    seq: int
    """The message's number, from 1."""
    reply_to: str
    """The sender's mailbox, as the receiver reaches it."""
    frames: list[bytes]
    asked: int
    """Of a probe, and of the word that answers it: the number that was asked for."""


_encode = msgspec.msgpack.Encoder().encode


class TcpLine:
    """To another node: encrypted, and each end proves that it has the key."""

    def __init__(self, context: Any, endpoint: str, key: SessionKey | None) -> None:
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if key is not None:
            key.present(self._socket)
        self._socket.connect(endpoint)

    def send(self, data: bytes) -> None:
        send_or_lose(self._socket, self._endpoint, data)

    def close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)


def send_or_lose(socket: zmq.Socket[bytes], endpoint: str, data: bytes) -> None:
    """Without waiting. ZeroMQ gives a connection up where something else than our peer has answered (a port may have
    been another's meanwhile), and would then wait for ever: the message is lost, the next has a new connection."""
    try:
        socket.send(data, zmq.NOBLOCK)
    except zmq.Again:
        with contextlib.suppress(zmq.ZMQError):
            socket.disconnect(endpoint)
        socket.connect(endpoint)


class Peer:
    """A line and both directions' counts. The lock guards what is sent, and the line, which one thread may use at a
    time; what arrives is counted by the one thread that reads."""

    def __init__(self, line: UnixLine | TcpLine, reply_to: str) -> None:
        """What is sent on `line` arrives in order; some may be lost."""
        self.token = os.urandom(8)
        self.unconfirmed: deque[tuple[int, list[bytes]]] = deque()
        self._num_sent = 0
        self._heard_s = 0.0
        self._their_token = bytes(8)
        self._num_received = self._num_told = 0
        self._line, self._reply_to = line, reply_to
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, frames: Sequence[Any]) -> None:
        """Send, and keep until the other end has it."""
        kept = [bytes(frame) for frame in frames]
        with self._lock:
            if not self.unconfirmed:
                self._heard_s = time.monotonic()
            self._num_sent += 1
            self.unconfirmed.append((self._num_sent, kept))
            self._write(self._num_sent, kept)

    def confirm(self, letter: Letter) -> None:
        """The other end says how much it has; where it was asked for more, the rest goes out again."""
        unconfirmed = self.unconfirmed
        with self._lock:
            if unconfirmed and unconfirmed[0][0] <= letter.ack:
                self._heard_s = time.monotonic()
                while unconfirmed and unconfirmed[0][0] <= letter.ack:
                    unconfirmed.popleft()
            if letter.seq == WORD and letter.ack < letter.asked:
                for seq, frames in unconfirmed:
                    self._write(seq, frames)

    def probe(self, now_s: float) -> None:
        """Where the other end has been silent about something for too long."""
        with self._lock:
            if self.unconfirmed and now_s - self._heard_s >= PROBE_S:
                self._heard_s = now_s
                self._write(PROBE, [], self._num_sent)

    def is_next(self, letter: Letter) -> bool:
        """Whether to deliver it: not what was before, nor what lacks one before it. With another token another process
        has come to the peer's address."""
        if letter.token != self._their_token:
            self._their_token = letter.token
            self._num_received = self._num_told = 0
        if letter.seq != self._num_received + 1:
            return False
        self._num_received += 1
        return True

    def tell(self, asked: int = 0) -> None:
        """How much has arrived: to who asked for it, or now and then, lest the other end keep too much."""
        if asked or self._num_received - self._num_told >= ACK_EVERY:
            with self._lock:
                self._write(WORD, [], asked)

    def close(self, linger_ms: int) -> None:
        with self._lock:
            self._is_closed = True
            self._line.close(linger_ms)

    def _write(self, seq: int, frames: list[bytes], asked: int = 0) -> None:
        if not self._is_closed:
            self._num_told = ack = self._num_received
            letter = Letter(self.token, self._their_token, ack, seq, self._reply_to, frames, asked)
            self._line.send(_encode(letter))
