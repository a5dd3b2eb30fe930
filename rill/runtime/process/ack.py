"""What makes messages between two mailboxes arrive once and in order, whatever becomes of the connection below.

    sender                                        receiver
    seq 1, 2, 3 … kept until confirmed ─────────▶ takes seq = received + 1, drops what it has, asks for what it lacks
           ◀── "I have n" in every message the other way, else after ACK_EVERY messages or ACK_BYTES
    no word for PROBE_S: "do you have n?" ──────▶ "I have m"; what is missing goes out again

A probe passes behind everything that was sent before it, so a receiver that is only busy is asked and never flooded. A
stream's random token tells it from that of an earlier process at the same address. The mailbox owns sockets and thread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

import msgspec

PROBE_S = 1.0
ACK_EVERY = 64
ACK_BYTES = 4 * 1024 * 1024

NO_STREAM = bytes(8)


class Letter(msgspec.Struct, array_like=True, gc=False):
    """A message as it travels."""

    token: bytes
    """Of the sender's stream."""
    ack_token: bytes
    """Of the receiver's stream the other way."""
    ack: int
    """How many messages of it the sender has."""
    seq: int
    """The message's number, from 1; 0: it is not counted (a probe, or the answer to one)."""
    reply_to: str
    """The sender's mailbox, as the receiver reaches it."""
    frames: list[Any]
    """None stands for a large frame, which follows as a part of its own."""


class Outgoing:
    """Messages to one peer. Used under the peer's lock."""

    def __init__(self) -> None:
        self.token = os.urandom(8)
        self.num_sent = 0
        self._unconfirmed: deque[tuple[int, Any]] = deque()
        self._heard_s = 0.0

    def number(self, message: Any) -> int:
        """Count and keep a message."""
        if not self._unconfirmed:
            self._heard_s = time.monotonic()
        self.num_sent += 1
        self._unconfirmed.append((self.num_sent, message))
        return self.num_sent

    def confirm(self, num_received: int) -> None:
        """The peer has so many."""
        if self._unconfirmed and self._unconfirmed[0][0] <= num_received:
            self._heard_s = time.monotonic()
        while self._unconfirmed and self._unconfirmed[0][0] <= num_received:
            self._unconfirmed.popleft()

    def unconfirmed(self) -> list[tuple[int, Any]]:
        return list(self._unconfirmed)

    def must_probe(self, now_s: float) -> bool:
        """Whether the peer has been silent about something for too long; counts as asked."""
        if not self._unconfirmed or now_s - self._heard_s < PROBE_S:
            return False
        self._heard_s = now_s
        return True


class Incoming:
    """Messages of one peer. Used by the thread that reads."""

    def __init__(self) -> None:
        self.token = NO_STREAM
        self.num_received = 0
        self._num_told = 0
        self._bytes_untold = 0
        self._asked_for = 0

    def is_next(self, letter: Letter, num_bytes: int) -> bool:
        """Whether to deliver a counted message; what was delivered before, or lacks one before it, is dropped."""
        self.follow(letter.token)
        if letter.seq != self.num_received + 1:
            return False
        self.num_received += 1
        self._bytes_untold += num_bytes
        return True

    def follow(self, token: bytes) -> None:
        """From now on this is the peer's stream: another process may have come to its address."""
        if token != self.token:
            self.token = token
            self.num_received = self._num_told = self._bytes_untold = self._asked_for = 0

    def must_ask(self, seq: int) -> bool:
        """Whether `seq` shows a gap that the sender was not told of yet."""
        if seq <= self.num_received + 1 or self._asked_for == self.num_received + 1:
            return False
        self._asked_for = self.num_received + 1
        return True

    def must_tell(self) -> bool:
        """Whether the sender should hear now what has arrived, lest it keep too much."""
        return self.num_received - self._num_told >= ACK_EVERY or self._bytes_untold >= ACK_BYTES

    def told(self) -> int:
        """The number to tell; counts as told."""
        self._num_told, self._bytes_untold = self.num_received, 0
        return self.num_received
