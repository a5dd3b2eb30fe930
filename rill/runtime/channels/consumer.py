"""The consuming end of a channel in one process: leases, read-ahead, acknowledgements and returned memory.

    take ──▶ buffer (read ahead) ──▶ the caller         the caller's next take says that it is done with the last one
                │ idle for a moment                     views of shared memory gone ──▶ released
                ▼
             given back: nobody starves behind a consumer that stopped taking

How far it reads ahead follows the consumer's own pace: what it would work through in READ_AHEAD_S, so a consumer of
long tasks holds one item and a tight loop holds hundreds. Up to its fair part of the queue, that is; what takes it no
longer than AT_ONCE_S is given to one consumer though others wait too: waking them all would cost more than the work.
Done, released and returned items travel with the next request, or by themselves within SETTLE_S.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from rill.runtime.hub.answer import Pending
from rill.runtime.hub.client import HubClient
from rill.runtime.hub.grants import EPOCH_END, ITEMS
from rill.runtime.transfer.ref import Ref
from rill.runtime.transfer.wire import decode

if TYPE_CHECKING:
    from rill.runtime.transfer.store import Store

READ_AHEAD_S = 0.002
AT_ONCE_S = 0.001
SETTLE_S = 0.01
IDLE_S = 0.02
_MAX_READ_AHEAD = 512
_LARGEST_STEP = 8.0

WireItem = tuple[int, float, Any, int, Any, Any]  # id, weight, key, num_bytes, inline, ref


class ConsumerPort:
    """Thread-safe. A holder is whoever takes: a thread, or a task of an event loop."""

    def __init__(
        self, hub: HubClient, store: Store, name: str, *, reads_ahead: bool, device: str | None = None
    ) -> None:
        self._device = device
        self._hub = hub
        self._store = store
        self._name = name
        self._reads_ahead = reads_ahead
        self._buffer: deque[WireItem] = deque()
        self._is_loop_buffer = False
        self._held: dict[object, list[int]] = {}
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._done: list[int] = []
        self._released: deque[int] = deque()
        self._unsettled_since_s = 0.0
        self._pace_s = READ_AHEAD_S
        self._returned_at_s = 0.0
        self._lock = threading.Lock()
        hub.add_ticker(self._tick)

    # --- taking -------------------------------------------------------------------------------------------

    def next_buffered(self, holder: object, *, in_loop: bool) -> WireItem | None:
        """An item that is here already. The holder is done with what it had."""
        with self._lock:
            self._note_pace()
            self._finish(holder)
            if self._buffer and self._is_loop_buffer != in_loop:
                self._give_back()
            if not self._buffer:
                return None
            item = self._buffer.popleft()
            self._held.setdefault(holder, []).append(item[0])
            return item

    def request(self, pending: Pending, *, min_items: int, in_loop: bool) -> None:
        """Ask the broker for items from the front; `min_items` 0 means the channel's granularity."""
        at_once = ahead = 1
        if self._reads_ahead and min_items <= 1:
            pace_s = max(self._pace_s, 1e-6)
            at_once, ahead = (
                max(1, min(_MAX_READ_AHEAD, int(t / pace_s))) for t in (AT_ONCE_S, READ_AHEAD_S)
            )
        with self._lock:
            if (
                self._released
            ):  # in the same message: the sooner their producer writes there again, the warmer it is
                self._settle()
            done, self._done = self._done, []
            payload = [self._name, min_items, at_once, max(min_items, ahead), in_loop, done]
            self._hub.submit("broker.take", payload, pending)

    def request_by(self, pending: Pending, holder: object, how: str, argument: Any, *, in_loop: bool) -> None:
        """Ask by "weight", "keys" or "ids". The holder is done with what it had."""
        with self._lock:
            self._finish(holder)
            self._settle()
            self._hub.submit("broker.take_by", [self._name, how, argument, in_loop], pending)

    def request_share(self, pending: Pending, holder: object, payload: list[Any]) -> None:
        with self._lock:
            self._finish(holder)
            self._settle()
            self._hub.submit("broker.take_share", [self._name, *payload], pending)

    def accept(
        self, holder: object, items: list[WireItem], *, num_wanted: int, in_loop: bool
    ) -> list[WireItem]:
        """Of a granted answer, the first `num_wanted` go to the holder and the rest into the buffer."""
        mine = items[:num_wanted]
        with self._lock:
            self._held.setdefault(holder, []).extend(item[0] for item in mine)
            if len(items) > num_wanted:
                if self._buffer and self._is_loop_buffer != in_loop:
                    self._give_back()
                self._is_loop_buffer = in_loop
                self._buffer.extend(items[num_wanted:])
                self._returned_at_s = time.monotonic()
                self._hub.wake()
            else:
                self._returned_at_s = time.monotonic()
        return mine

    def give_up(self, pending: Pending, method: str, *payload: Any) -> bool:
        """After a deadline: cancel, and send back what may still come. False: the answer has just come."""
        if not pending.abandon(self._return_grant):
            return False
        self._hub.submit(f"broker.{method}", [self._name, *payload, pending.seq])
        return True

    def send_back(self, pending: Pending) -> None:
        """Return what an answer brought that is here already."""
        if pending.error is None:
            self._return_grant(pending.value)

    def open(self, item: WireItem) -> Any:
        """The object itself; tensors that were on a GPU arrive on this process's device."""
        item_id, _, _, _, inline, ref = item
        if ref is None:
            if isinstance(inline, bytes):
                return decode(inline, (), device=self._device)
            return decode(inline[0], [bytearray(part) for part in inline[1:]], device=self._device)
        return self._store.read(Ref.of(ref), lambda: self._release(item_id), device=self._device)

    def finish(self, holder: object) -> None:
        """The holder is done with everything it has taken."""
        with self._lock:
            self._finish(holder)

    def settle(self) -> bool:
        """Send what is finished now rather than with the next request; whether there was anything."""
        with self._lock:
            return self._settle()

    def finish_with(self, task: asyncio.Task[Any]) -> None:
        """The holder is a task: it is done with what it took when it ends."""
        if task not in self._tasks:
            self._tasks.add(task)
            task.add_done_callback(self.finish)

    def close(self) -> None:
        """Nothing will be taken here any more."""
        self._hub.remove_ticker(self._tick)

    def put_back(self) -> None:
        """Return what was read ahead: the holder has left its loop."""
        with self._lock:
            self._give_back()
            self._settle()

    # --- settling -----------------------------------------------------------------------------------------

    def _note_pace(self) -> None:
        """How long the caller was away since its last item."""
        if self._returned_at_s:
            now_s = time.monotonic()
            # A processor shared with others is away for milliseconds now and then: not this consumer's pace. One that
            # does become slow is known to be within a few items, and what lies unused goes back after IDLE_S.
            away_s = min(now_s - self._returned_at_s, _LARGEST_STEP * self._pace_s)
            self._pace_s += 0.2 * (away_s - self._pace_s)
            self._returned_at_s = now_s

    def _finish(self, holder: object) -> None:
        held = self._held.pop(holder, None)
        if held:
            if not self._done:
                self._mark_unsettled()
            self._done.extend(held)

    def _release(self, item_id: int) -> None:
        """From a finalizer: no lock may be taken here."""
        self._released.append(item_id)
        if not self._unsettled_since_s:
            self._mark_unsettled()

    def _mark_unsettled(self) -> None:
        if not self._unsettled_since_s:
            self._unsettled_since_s = time.monotonic()
            self._hub.wake()

    def _give_back(self) -> None:
        if self._buffer:
            returned = [item[0] for item in self._buffer]
            self._buffer.clear()
            self._hub.submit("broker.settle", [self._name, [], [], returned])

    def _return_grant(self, answer: Any) -> None:
        """An answer that came after its deadline."""
        if answer[0] == ITEMS and answer[1]:
            returned = [item[0] for item in answer[1]]
            self._hub.submit("broker.settle", [self._name, [], [], returned])
        elif answer[0] == EPOCH_END:
            self._hub.submit("broker.unend", self._name)

    def _settle(self) -> bool:
        self._unsettled_since_s = 0.0
        done, self._done = self._done, []
        released = []
        while self._released:
            released.append(self._released.popleft())
        if done or released:
            self._hub.submit("broker.settle", [self._name, done, released, []])
        return bool(done or released)

    def _tick(self, now_s: float) -> float:
        """On the io thread: send acknowledgements that found no request to travel with; return idle read-ahead."""
        wait_s = 1.0
        if not (self._unsettled_since_s or self._buffer or self._released):
            return wait_s
        with self._lock:
            if self._buffer:
                idle_s = now_s - self._returned_at_s
                if idle_s >= IDLE_S:
                    self._give_back()
                else:
                    wait_s = IDLE_S - idle_s + 0.001
            if self._unsettled_since_s or self._released:
                waited_s = now_s - self._unsettled_since_s
                if waited_s >= SETTLE_S:
                    self._settle()
                else:
                    wait_s = min(wait_s, SETTLE_S - waited_s + 0.001)
        return wait_s
