"""How far a sender may run ahead of each of its peers: bytes not yet received, and chunks not yet taken.

One per process, shared by all its sends. Thread-safe; `transfer.py` feeds it receipts, credits and deaths.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rill.errors import PeerDiedError, StuckError
from rill.runtime.context import WorkerAddress
from rill.runtime.directory import remaining_s
from rill.runtime.waits import waiting

WINDOW_BYTES = 256 * 1024 * 1024
"""A sender runs ahead of its peer's receives by at most this much, or by one object."""
CHUNKS_IN_FLIGHT = 8


@dataclass(slots=True)
class _Window:
    unreceived_bytes: int = 0
    credits: int = CHUNKS_IN_FLIGHT
    death: str | None = None


class Windows:
    """The windows of one process, by its peers' identities."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._windows: dict[str, _Window] = {}

    def enter(self, peer: WorkerAddress, num_bytes: int, deadline_s: float) -> None:
        """Wait until `num_bytes` more may be on their way to `peer`, and count them."""
        with self._changed:
            window = self._of(peer)
            self._wait(
                window,
                peer,
                lambda: window.unreceived_bytes == 0 or window.unreceived_bytes + num_bytes <= WINDOW_BYTES,
                deadline_s,
                "to receive what was sent before",
            )
            window.unreceived_bytes += num_bytes

    def wait_empty(self, peer: WorkerAddress, deadline_s: float) -> None:
        """Wait until `peer` has received everything."""
        with self._changed:
            window = self._of(peer)
            self._wait(window, peer, lambda: window.unreceived_bytes == 0, deadline_s, "to receive")

    def take_credit(self, peer: WorkerAddress, deadline_s: float) -> None:
        """Wait until one more chunk may be on its way to `peer`, and count it."""
        with self._changed:
            window = self._of(peer)
            self._wait(window, peer, lambda: window.credits > 0, deadline_s, "to take a chunk")
            window.credits -= 1

    def wait_all_credits(self, peer: WorkerAddress, deadline_s: float) -> None:
        """Wait until `peer` has taken every chunk."""
        with self._changed:
            window = self._of(peer)
            self._wait(
                window, peer, lambda: window.credits == CHUNKS_IN_FLIGHT, deadline_s, "to take the last chunk"
            )

    def received(self, identity: str, num_bytes: int) -> None:
        with self._changed:
            if identity in self._windows:
                self._windows[identity].unreceived_bytes -= num_bytes
                self._changed.notify_all()

    def credited(self, identity: str) -> None:
        with self._changed:
            if identity in self._windows:
                self._windows[identity].credits += 1
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
            raise PeerDiedError(f"{self._owner}: send to {peer.name}, which is gone: {window.death}")
        if not in_time:
            raise StuckError(f"{self._owner}: send waited for {peer.name} {what} until its deadline")
