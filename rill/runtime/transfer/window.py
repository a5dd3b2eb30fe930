"""How far a sender may run ahead of each of its peers: objects not yet received, and chunks not yet taken.

One per process, shared by all its sends. Thread-safe; `transfer.py` feeds it receipts, credits and deaths. Every object
and every stream has a count of its own, so sends to one peer wait for their own receipts and not for each other's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.context import WorkerAddress
from rill.runtime.process.directory import remaining_s
from rill.runtime.process.waits import waiting

WINDOW_BYTES = 256 * 1024 * 1024
"""A sender runs ahead of its peer's receives by at most this much, or by one object."""
CHUNKS_IN_FLIGHT = 8
"""Of one stream."""
_NEWS_S = 1.0


@dataclass(slots=True)
class _Window:
    unreceived: dict[int, int] = field(default_factory=dict)
    """Bytes by the object's number."""
    unreceived_bytes: int = 0
    credits: dict[bytes, int] = field(default_factory=dict)
    """Chunks that may still go, by the stream's token."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Why objects that the peer waits for cannot reach it, by number."""
    death: str | None = None

    def forget(self, number: int) -> None:
        self.unreceived_bytes -= self.unreceived.pop(number, 0)


class Windows:
    """The windows of one process, by its peers' identities."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._windows: dict[str, _Window] = {}
        self._numbers = itertools.count(1)

    def enter(self, peer: WorkerAddress, num_bytes: int, deadline_s: float) -> int:
        """Wait until `num_bytes` more may be on their way to `peer`; gives the object's number."""
        with self._changed:
            window = self._of(peer)
            self._wait(
                window,
                peer,
                lambda: not window.unreceived or window.unreceived_bytes + num_bytes <= WINDOW_BYTES,
                deadline_s,
                "to receive what was sent before",
            )
            number = next(self._numbers)
            window.unreceived[number] = num_bytes
            window.unreceived_bytes += num_bytes
            return number

    def wait_received(self, peer: WorkerAddress, number: int, deadline_s: float) -> None:
        """Wait until `peer` has received the object of that number."""
        with self._changed:
            window = self._of(peer)
            self._wait(
                window,
                peer,
                lambda: number not in window.unreceived or number in window.refusals,
                deadline_s,
                "to receive",
            )
            refusal = window.refusals.pop(number, None)
            if refusal is not None:
                window.forget(number)
                # A link also breaks when the peer dies, and says so before the news of the death is here.
                if self._changed.wait_for(lambda: window.death is not None, _NEWS_S):
                    raise self._death(peer, window)
                raise RunError(f"{self._owner}: send to {peer.name} failed: {refusal}")

    def leave(self, peer: WorkerAddress, number: int) -> None:
        """The object of that number did not get away."""
        self.received(peer.identity, number)

    def begin_stream(self, peer: WorkerAddress, token: bytes) -> None:
        """A stream of chunks to `peer`; end it in any case."""
        with self._changed:
            self._of(peer).credits[token] = CHUNKS_IN_FLIGHT

    def end_stream(self, peer: WorkerAddress, token: bytes) -> None:
        with self._changed:
            self._of(peer).credits.pop(token, None)

    def take_credit(self, peer: WorkerAddress, token: bytes, deadline_s: float) -> None:
        """Wait until one more chunk of the stream may be on its way to `peer`, and count it."""
        with self._changed:
            window = self._of(peer)
            self._wait(window, peer, lambda: window.credits[token] > 0, deadline_s, "to take a chunk")
            window.credits[token] -= 1

    def wait_all_credits(self, peer: WorkerAddress, token: bytes, deadline_s: float) -> None:
        """Wait until `peer` has taken every chunk of the stream."""
        with self._changed:
            window = self._of(peer)
            self._wait(
                window,
                peer,
                lambda: window.credits[token] == CHUNKS_IN_FLIGHT,
                deadline_s,
                "to take the last chunk",
            )

    def received(self, identity: str, number: int) -> None:
        with self._changed:
            if identity in self._windows:
                self._windows[identity].forget(number)
                self._changed.notify_all()

    def refused(self, identity: str, number: int, reason: str) -> None:
        """The object of that number cannot reach its peer: its send fails."""
        with self._changed:
            if identity in self._windows and number in self._windows[identity].unreceived:
                self._windows[identity].refusals[number] = reason
                self._changed.notify_all()

    def credited(self, identity: str, token: bytes) -> None:
        with self._changed:
            if identity in self._windows and token in self._windows[identity].credits:
                self._windows[identity].credits[token] += 1
                self._changed.notify_all()

    def peer_died(self, identity: str, reason: str) -> None:
        """End every wait on a peer."""
        with self._changed:
            if identity in self._windows:
                self._windows[identity].death = reason
                self._changed.notify_all()

    def _of(self, peer: WorkerAddress) -> _Window:
        return self._windows.setdefault(peer.identity, _Window())

    def _wait(
        self, window: _Window, peer: WorkerAddress, ready: Callable[[], bool], deadline_s: float, what: str
    ) -> None:
        with waiting(f"send to {peer.name}", peer.name):
            in_time = self._changed.wait_for(
                lambda: window.death is not None or ready(), remaining_s(deadline_s)
            )
        if window.death is not None:
            raise self._death(peer, window)
        if not in_time:
            raise StuckError(f"{self._owner}: send waited for {peer.name} {what} until its deadline")

    def _death(self, peer: WorkerAddress, window: _Window) -> PeerDiedError:
        return PeerDiedError(f"{self._owner}: send to {peer.name}, which is gone: {window.death}")
