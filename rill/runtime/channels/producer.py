"""The producing end of a channel in one process: descriptors on their way to the broker.

Unbounded channels: `put` returns once the descriptor is queued here. One message is under way at a time: what is put
meanwhile gathers and goes out when the broker has confirmed it, so a lone item leaves at once, and the busier the hub
the larger the messages, whatever the number of producers. A window bounds what is not confirmed.

Bounded channels: `put` returns once the broker has let the item in, so a full channel stops its producer at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from rill import errors
from rill.errors import RillError, RunError
from rill.runtime.hub.answer import Pending
from rill.runtime.hub.client import HubClient

if TYPE_CHECKING:
    from rill.runtime.transfer.store import Store

INLINE_BYTES = 4096
"""Payloads up to this size ride in the descriptor."""
_WINDOW_ITEMS = 16384
_WINDOW_BYTES = 16 * 1024 * 1024
_ITEMS_PER_MESSAGE = 2048

Descriptor = list[Any]


class ProducerPort:
    """Thread-safe. Descriptors are [weight, key, num_bytes, inline, ref]."""

    def __init__(self, hub: HubClient, store: Store, name: str) -> None:
        self._hub = hub
        self._store = store
        self._name = name
        self._outgoing: list[Descriptor] = []
        self._is_scheduled = False
        self._round = 0
        self._in_flight: deque[tuple[int, int]] = deque()
        self._num_unconfirmed = 0
        self._unconfirmed_bytes = 0
        self._error: RillError | None = None
        self._lock = threading.Lock()
        self._confirmed = threading.Condition(self._lock)
        hub.on("put_failed", self._fail)

    def put(self, descriptor: Descriptor, deadline_s: float) -> bool:
        """Queue one item; false when the window stayed full until the deadline and the item was not put."""
        num_bytes = descriptor[2] if descriptor[4] is None else 0
        with self._lock:
            while self._num_unconfirmed >= _WINDOW_ITEMS or self._unconfirmed_bytes >= _WINDOW_BYTES:
                if not self._confirmed.wait(deadline_s - time.monotonic()):
                    return False
            if self._error is not None:
                raise self._error
            self._outgoing.append(descriptor)
            self._num_unconfirmed += 1
            self._unconfirmed_bytes += num_bytes
            if not (self._is_scheduled or self._in_flight):
                self._schedule()
        return True

    def put_bounded(self, descriptors: list[Descriptor], pending: Pending) -> None:
        """Ask for room; the answer is the number of items that did not get in (0, unless it was cancelled)."""
        self._hub.submit("broker.put_wait", [self._name, descriptors], pending)

    def cancel(self, pending: Pending) -> None:
        """Take back what has no room yet; `pending` is answered in any case."""
        self._hub.submit("broker.cancel_put", [self._name, pending.seq], Pending())

    def seal(self) -> None:
        """Fix the order: everything put so far goes out before whatever this process sends next."""
        with self._lock:
            self._round += 1
            self._is_scheduled = False
            while self._outgoing:
                self._hub.submit("broker.put", self._cut(), on_confirm=self._confirm)

    def flush(self, timeout_s: float) -> None:
        """Return when the broker has everything that was put."""
        self.seal()
        self._hub.call("registry", "sync", None, timeout_s)
        self.check()

    @property
    def has_unconfirmed(self) -> bool:
        """Whether anything that was put might not be with the broker yet."""
        return self._num_unconfirmed > 0

    def check(self) -> None:
        """Raise what the broker said against something that was put."""
        if self._error is not None:
            raise self._error

    # --- on the io thread ---------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._is_scheduled = True
        current_round = self._round
        self._hub.submit("broker.put", lambda: self._drain(current_round), on_confirm=self._confirm)

    def _drain(self, scheduled_round: int) -> list[Any] | None:
        with self._lock:
            if scheduled_round != self._round or not self._outgoing:
                if scheduled_round == self._round:
                    self._is_scheduled = False
                return None
            payload = self._cut()
            if self._outgoing:
                self._schedule()
            else:
                self._is_scheduled = False
            return payload

    def _cut(self) -> list[Any]:
        batch = self._outgoing[:_ITEMS_PER_MESSAGE]
        del self._outgoing[:_ITEMS_PER_MESSAGE]
        num_bytes = sum(d[2] for d in batch if d[4] is None)
        self._in_flight.append((len(batch), num_bytes))
        return [self._name, batch]

    def _confirm(self) -> None:
        with self._lock:
            num_items, num_bytes = self._in_flight.popleft()
            self._num_unconfirmed -= num_items
            self._unconfirmed_bytes -= num_bytes
            if self._outgoing and not (self._is_scheduled or self._in_flight):
                self._schedule()
            self._confirmed.notify_all()

    def _fail(self, note: Any) -> None:
        name, kind, message = note
        if name == self._name:
            cls = vars(errors).get(kind, RunError)
            self._error = cls(message)
