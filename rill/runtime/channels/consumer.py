"""The consuming end of a channel in one process: waits, leases, read-ahead and returned memory.

    take ──▶ [read ahead] ──▶ a lease, and the object itself       lease done ──▶ one commit with what was put
                  │ idle for a moment                              views of shared memory gone ──▶ released
                  ▼
             given back: nobody starves behind a consumer that stopped taking

A loop over an unbounded channel reads ahead as long as its items take it no time: twice as many with every refill, half
as many as soon as an item takes longer than QUICK_S, and never more than its part of the queue. On an event loop, which
only begins with an item, it takes all of its part at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rill.errors import in_words
from rill.runtime.channels.lease import Lease
from rill.runtime.channels.producer import Producer, came_while_lending
from rill.runtime.hub.client import Asked
from rill.runtime.hub.messages import GiveBack, Grant, Ids, Item, Puts, Take
from rill.runtime.process.report import stuck
from rill.runtime.process.waits import waiting
from rill.runtime.transfer.wire import decode

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

QUICK_S = 0.001
MAX_AHEAD = 256
IDLE_S = 0.02
"""What was read ahead and is not touched for so long goes back."""


class Consumer:
    def __init__(self, context: RuntimeContext, producer: Producer) -> None:
        self.name = producer.name
        self._context = context
        self._hub = context.hub
        self.producer = producer
        self._ahead: deque[Item] = deque()
        self._num_ahead = 1
        self._num_given = 0
        self._refilled_s = 0.0
        self._touched_s = 0.0
        self._released: deque[int] = deque()
        self._dropped: deque[tuple[list[int], list[Puts]]] = deque()
        self._is_passing = False
        self._lock = threading.RLock()
        self._hub.add_ticker(self._tick)

    def take(self, take: Take, timeout_s: float) -> tuple[Lease | None, list[Any]]:
        """The next item, or those of `take.keys`; nothing at the epoch's end."""
        items = self._next_ahead(take)
        if items is None:
            with self._asking(take) as asked:
                if not asked.done():
                    with waiting(what := f"take from channel {self.name!r}", f"channel:{self.name}"):
                        if not came_while_lending(self._context, asked, timeout_s):
                            raise stuck(self._context, what, timeout_s)
                items = self._accept(take, asked.result())
        return self._open(items, is_of_thread=True)

    async def take_async(self, take: Take, timeout_s: float) -> tuple[Lease | None, list[Any]]:
        """As `take`, on an event loop; nothing but the lease itself says when it is done."""
        items = self._next_ahead(take, on_loop=True)
        if items is None:
            what = f"take from channel {self.name!r}"
            with self._asking(take) as asked, waiting(what, f"channel:{self.name}"):
                has_come, _ = await asyncio.wait([asyncio.wrap_future(asked)], timeout=timeout_s)
                if not has_come:
                    raise stuck(self._context, what, timeout_s)
                items = self._accept(take, asked.result())
        return self._open(items, is_of_thread=False)

    @contextmanager
    def _asking(self, take: Take) -> Iterator[Asked[Grant]]:
        """Around the wait for an answer. Whatever ends it early, an interrupt too, leaves no lease that nobody knows
        of: what the take brings, or has brought, goes back."""
        asked = self._hub.ask("broker.take", take, Grant, self._return_grant)
        try:
            yield asked
        except BaseException:
            if asked.withdraw():
                self._hub.submit("broker.cancel", asked.seq)
            raise

    def _next_ahead(self, take: Take, *, on_loop: bool = False) -> list[Item] | None:
        """From what is here already. Only loops read ahead; whoever else takes gives it back first."""
        with self._lock:
            now_s = self._touched_s = time.monotonic()
            if not take.in_loop:
                self.return_ahead()
            elif self._ahead:
                self._num_given += 1
                return [self._ahead.popleft()]
            elif on_loop:
                take.max_items = 1 if self.producer.is_bounded else MAX_AHEAD
            elif not self.producer.is_bounded:
                is_quick = now_s - self._refilled_s < QUICK_S * self._num_given
                more, less = min(MAX_AHEAD, 2 * self._num_ahead), max(1, self._num_ahead // 2)
                take.max_items = self._num_ahead = more if is_quick else less
            return None

    def _accept(self, take: Take, grant: Grant) -> list[Item]:
        """Of what was granted without keys the first is wanted, the rest is read ahead."""
        if not grant.items:
            self._is_passing = grant.is_end
            return []
        num_wanted = 1 if take.keys is None else len(grant.items)
        with self._lock:
            self._refilled_s = self._touched_s = time.monotonic()
            self._num_given = 1
            self._ahead.extend(grant.items[num_wanted:])
        if self._ahead:
            self._hub.wake()
        return grant.items[:num_wanted]

    def _open(self, items: list[Item], *, is_of_thread: bool) -> tuple[Lease | None, list[Any]]:
        if not items:
            return None, []
        lease = Lease(self, items, is_of_thread=is_of_thread)
        try:
            values = [self._value(item) for item in items]
        except Exception as error:
            lease.give_back(f"it could not be read: {in_words(error)}")
            raise
        self.producer.recorder.took(self.name, items)
        return lease, values

    def _value(self, item: Item) -> Any:
        """The object itself; tensors that were on a GPU arrive on this process's device."""
        device = self._context.torch_device
        if item.ref is not None:
            return self._context.store.read(item.ref, lambda: self._release(item.id), device=device)
        assert item.inline is not None
        return decode(item.inline, (), device=device)

    def _return_grant(self, grant: Grant) -> None:
        if grant.items:
            self.give_back([item.id for item in grant.items])
        elif grant.is_end:
            self._hub.submit("broker.unend", self.name)

    def give_back(self, ids: list[int], puts: Sequence[Puts] = (), error: str = "") -> None:
        """These items are somebody else's; what was put for them is not put."""
        for part in puts:
            self.producer.forget(part.items)
        self._hub.submit("broker.give_back", GiveBack(self.name, ids, error))

    def dropped(self, ids: list[int], puts: list[Puts]) -> None:
        """From a finalizer, where no lock may be taken: a lease that nobody finished."""
        self._dropped.append((ids, puts))
        self._hub.wake()

    def pass_end(self) -> bool:
        """A call ends well: should its process die now, the epoch's end that its loop met does not come again."""
        is_passing, self._is_passing = self._is_passing, False
        if is_passing:
            self._hub.submit("broker.pass_end", self.name)
        return is_passing

    def return_ahead(self) -> None:
        """A loop was left: what it had read ahead goes back."""
        with self._lock:
            if self._ahead:
                self.give_back([item.id for item in self._ahead])
                self._ahead.clear()

    def close(self) -> None:
        self.return_ahead()
        self._hub.remove_ticker(self._tick)

    def _release(self, item_id: int) -> None:
        """From a finalizer: no lock may be taken here."""
        self._released.append(item_id)
        self._hub.wake()

    def _tick(self, now_s: float) -> float:
        """On the io thread: tell of released memory, return what is not used."""
        while self._dropped:
            ids, puts = self._dropped.popleft()
            self.give_back(ids, puts, "its lease was dropped without `done`")
        if self._released:
            released = [self._released.popleft() for _ in range(len(self._released))]
            self._hub.submit("broker.release", Ids(self.name, released))
        if not self._ahead:
            return 1.0
        with self._lock:
            idle_s = now_s - self._touched_s
            if idle_s < IDLE_S:
                return IDLE_S - idle_s + 0.001
            self.return_ahead()
            return 1.0
