"""What makes messages between two mailboxes arrive once and in order, whatever becomes of the connection below.

    sender                                        receiver
    seq 1, 2, 3 … kept until confirmed ─────────▶ takes seq = received + 1, drops everything else
           ◀── "I have m" in every message the other way, else after ACK_EVERY messages
    no word for PROBE_S: "do you have n?" ──────▶ "I have m, you asked for n"; where m < n, all of it goes out again

A probe passes behind everything that was sent before it, so a receiver that is only busy is asked and never flooded. A
stream's random token tells it from that of an earlier process at the same address. The mailbox owns sockets and thread.
"""

from __future__ import annotations

import os
import time
from collections import deque

import msgspec

PROBE_S = 1.0
ACK_EVERY = 64

NO_STREAM = bytes(8)


class Letter(msgspec.Struct, array_like=True, gc=False):
    token: bytes
    """Of the sender's stream."""
    ack_token: bytes
    """Of the receiver's stream the other way."""
    ack: int
    """How many messages of it the sender has."""
    seq: int
    """The message's number, from 1; 0: it is not counted (a probe, or a word on what has arrived)."""
    reply_to: str
    """The sender's mailbox, as the receiver reaches it."""
    frames: list[bytes]


class Outgoing:
    """Messages to one peer. Used under the peer's lock."""

    def __init__(self) -> None:
        self.token = os.urandom(8)
        self.num_sent = 0
        self.unconfirmed: deque[tuple[int, list[bytes]]] = deque()
        self._heard_s = 0.0

    def number(self, frames: list[bytes]) -> int:
        if not self.unconfirmed:
            self._heard_s = time.monotonic()
        self.num_sent += 1
        self.unconfirmed.append((self.num_sent, frames))
        return self.num_sent

    def confirm(self, num_received: int) -> None:
        unconfirmed = self.unconfirmed
        if unconfirmed and unconfirmed[0][0] <= num_received:
            self._heard_s = time.monotonic()
            while unconfirmed and unconfirmed[0][0] <= num_received:
                unconfirmed.popleft()

    def must_probe(self, now_s: float) -> bool:
        """Whether the peer has been silent about something for too long; counts as asked."""
        if not self.unconfirmed or now_s - self._heard_s < PROBE_S:
            return False
        self._heard_s = now_s
        return True


class Incoming:
    """Messages of one peer. Used by the thread that reads."""

    def __init__(self) -> None:
        self.token = NO_STREAM
        self.num_received = 0
        self._num_told = 0

    def is_next(self, letter: Letter) -> bool:
        """Whether to deliver it. A probe is never delivered; neither is what was before, or lacks one before it. With
        another token another process has come to the peer's address."""
        if letter.token != self.token:
            self.token = letter.token
            self.num_received = self._num_told = 0
        if letter.seq != self.num_received + 1:
            return False
        self.num_received += 1
        return True

    def must_tell(self) -> bool:
        """Whether the sender should hear now what has arrived, lest it keep too much."""
        return self.num_received - self._num_told >= ACK_EVERY

    def told(self) -> int:
        """The number to tell; counts as told."""
        self._num_told = self.num_received
        return self.num_received
