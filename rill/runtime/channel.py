"""Channel: a first-in first-out flow of objects between any producers and any consumers of a cluster.

Descriptors go through the broker (broker.py), payloads stay in shared memory where they were produced (store.py). A
handle can be pickled and passed to workers; every process opens its own ends at first use (channel_ends.py).

    producers ──put──▶ [ broker: descriptors, leases, epochs ] ──take──▶ consumers
        └──────────── payload: shared memory of the producer's node ────────────┘

Guarantees:
- An item is handed to one live consumer at a time. It is finished when its consumer takes the next one, leaves the
  loop, ends the task that took it, or calls `done()`; if the consumer dies before that, it goes back to the front.
- What one producer puts is taken in that order. `flush` returns when everything put so far would survive this process.
- `capacity_items` and `capacity_bytes` bound what waits in the channel; `put` on a full channel waits.
- Epochs: `end()` ends the current one, when called once by the channel's creator, or by every rank of a worker group,
  or by `producers` different processes where that was given. A consumer's loop ends when its epoch has ended and all
  its items are finished; items put after an `end()` belong to the next. A consumer meets every epoch that was not
  over when its group was launched.
- Objects are built on shared memory without a copy; the memory is used again only when nothing looks at it any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import ConfigError
from rill.runtime.channels.consumer import ConsumerPort, WireItem
from rill.runtime.channels.ends import HUB_S, ChannelEnds, ChannelSettings, checked_key, ends_of
from rill.runtime.context import current
from rill.runtime.hub.answer import Pending
from rill.runtime.hub.grants import EPOCH_END, ITEMS
from rill.runtime.process.report import stuck

if TYPE_CHECKING:
    from rill.runtime.cluster import Cluster

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """What is known of a queued item without its payload: what a choice is made from."""

    id: int
    weight: float
    key: Any
    num_bytes: int


Choice = Callable[[Sequence[ItemInfo]], Sequence[ItemInfo]]
"""A consumer's own policy: from what is queued, the items to take together; none to wait for more."""


class Lease:
    """One object taken by `Channel.leases`. If its process dies before `done`, the object goes back."""

    __slots__ = ("_consumer", "value")

    def __init__(self, consumer: ConsumerPort) -> None:
        self._consumer = consumer
        self.value: Any = None

    def done(self) -> None:
        """This object is dealt with."""
        self._consumer.finish(self)


class Channel:
    """A handle. Equal in every process it is sent to."""

    def __init__(self, settings: ChannelSettings) -> None:
        """Use `Channel.create`; this rebuilds a handle of a channel that exists."""
        self.name = settings.name
        self.timeout_s = settings.timeout_s
        """Deadline of every wait that gives none of its own."""
        self._settings = settings

    @classmethod
    def create(
        cls,
        cluster: Cluster | None,
        name: str,
        *,
        capacity_items: int | None = None,
        capacity_bytes: int | None = None,
        granularity: int = 1,
        producers: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Channel:
        """Make a channel in `cluster` (None: the cluster of this process).

        `granularity`: items that loops receive at a time; a plan sets it, worker code never mentions it.
        `producers`: how many processes end an epoch (see above).
        `timeout_s`: deadline of every wait that gives none of its own.
        """
        for what, value in (("capacity_items", capacity_items), ("capacity_bytes", capacity_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"channel {name!r}: {what}={value}: give at least 1, or None for no bound")
        if granularity < 1:
            raise ConfigError(f"channel {name!r}: granularity={granularity}: give at least 1")
        options = {
            "capacity_items": capacity_items,
            "capacity_bytes": capacity_bytes,
            "granularity": granularity,
            "producers": producers,
        }
        context = current() if cluster is None else cluster.context
        context.hub.call("broker", "create", [name, options], HUB_S)
        is_bounded = capacity_items is not None or capacity_bytes is not None
        return cls(ChannelSettings(name, is_bounded, timeout_s))

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (
            self._settings
        )  # as plain values: handles travel with every call, and a dataclass is slow to pickle
        return _rebuild, (settings.name, settings.is_bounded, settings.timeout_s)

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    # --- putting ------------------------------------------------------------------------------------------

    def put(
        self, obj: Any, weight: float = 1.0, key: Hashable | None = None, timeout_s: float | None = None
    ) -> None:
        """Put one object. On a bounded channel returns when it is in; otherwise when it is on its way."""
        self._ends().put(obj, weight, None if key is None else checked_key(self.name, key), timeout_s)

    def put_many(
        self, objects: Sequence[Any], weights: Sequence[float] | None = None, timeout_s: float | None = None
    ) -> None:
        """Put several objects with one message."""
        self._ends().put_all(self._weighted("put_many", objects, weights), None, timeout_s)

    async def put_async(
        self, obj: Any, weight: float = 1.0, key: Hashable | None = None, timeout_s: float | None = None
    ) -> None:
        """As `put`, without blocking the event loop while the channel is full."""
        await self._ends().put_async(obj, weight, checked_key(self.name, key), timeout_s)

    def put_share(
        self,
        key: Hashable,
        objects: Sequence[Any],
        *,
        rank: int,
        world_size: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        """This rank's part of a redistribution named `key`; `take_share` cuts the whole for other sizes."""
        ends = self._ends()
        descriptors = [
            ends.descriptor(obj, weight, None, ends.deadline(None))
            for obj, weight in self._weighted("put_share", objects, weights)
        ]
        ends.context.hub.call(
            "broker",
            "put_share",
            [self.name, checked_key(self.name, key), rank, world_size, descriptors],
            HUB_S,
        )

    def _weighted(
        self, method: str, objects: Sequence[Any], weights: Sequence[float] | None
    ) -> list[tuple[Any, float]]:
        if weights is None:
            return [(obj, 1.0) for obj in objects]
        if len(weights) != len(objects):
            raise ConfigError(f"{self.name}: {method} got {len(objects)} objects and {len(weights)} weights")
        return list(zip(objects, weights, strict=True))

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything put by this process is with the broker, and would survive this process."""
        ends = self._ends()
        ends.producer.flush(ends.limit_s(timeout_s))

    def end(self) -> None:
        """End the epoch (see above for whose call counts). The next epoch may begin at once."""
        ends = self._ends()
        ends.producer.seal()
        ends.context.hub.call("broker", "end", self.name, HUB_S)

    # --- taking -------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None = None, *, keys: Sequence[Hashable] | None = None) -> Any:
        """The next object, of whatever epoch; with `keys`, the list of exactly those, once all of them are there."""
        ends, holder = self._ends(), threading.get_ident()
        if keys is not None:
            found = ends.take_by(
                holder,
                "keys",
                [checked_key(self.name, k) for k in keys],
                ends.deadline(timeout_s),
                in_loop=False,
            )
            return [ends.consumer.open(item) for item in found or ()]
        items = ends.take_front(holder, ends.deadline(timeout_s), min_items=1, in_loop=False)
        assert items
        return ends.consumer.open(items[0])

    async def take_async(self, timeout_s: float | None = None) -> Any:
        """As `take` on an event loop: what a task took is done when it takes again or ends."""
        ends, task = self._ends(), asyncio.current_task()
        item = ends.consumer.next_buffered(task, in_loop=False)
        if item is None:
            answer = await ends.answer(
                lambda pending: ends.consumer.request(pending, min_items=1, in_loop=False), timeout_s
            )
            (item,) = ends.consumer.accept(task, answer[1], num_wanted=1, in_loop=False)
        if task is not None:
            ends.consumer.finish_with(task)
        return ends.consumer.open(item)

    def take_batch(
        self, *, weight: float | None = None, count: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Objects whose weights reach `weight`, or `count` objects; fewer when the epoch ends, none after its end."""
        self._check_batch(weight, count)
        ends, holder = self._ends(), threading.get_ident()
        deadline_s = ends.deadline(timeout_s)
        if weight is not None:
            items = ends.take_by(holder, "weight", float(weight), deadline_s, in_loop=True)
        else:
            assert count is not None
            items = ends.take_front(holder, deadline_s, min_items=count, in_loop=True, is_exact=True)
        return [ends.consumer.open(item) for item in items or ()]

    async def take_batch_async(
        self, *, weight: float | None = None, count: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """As `take_batch` on an event loop: what a task took is done when it takes again or ends."""
        self._check_batch(weight, count)
        ends, task = self._ends(), asyncio.current_task()

        def request(pending: Pending) -> None:
            if weight is not None:
                ends.consumer.request_by(pending, task, "weight", float(weight), in_loop=True)
            else:
                assert count is not None
                ends.consumer.finish(task)
                ends.consumer.request(pending, min_items=count, in_loop=True)

        kind, found, _ = await ends.answer(request, timeout_s)
        items = (
            ends.consumer.accept(task, found, num_wanted=len(found), in_loop=True) if kind == ITEMS else []
        )
        if task is not None:
            ends.consumer.finish_with(task)
        return [ends.consumer.open(item) for item in items]

    def _check_batch(self, weight: float | None, count: int | None) -> None:
        if (weight is None) == (count is None):
            raise ConfigError(f"{self.name}: take_batch needs one of weight= and count=")

    def take_chosen(self, choose: Choice, timeout_s: float | None = None) -> list[Any]:
        """What `choose` picks of the queued items. It runs here, again and again until it picks something that is
        still there; several consumers may choose at the same time."""
        ends, holder = self._ends(), threading.get_ident()
        deadline_s = ends.deadline(timeout_s)
        hub = ends.context.hub
        while True:
            version, rows = hub.query("broker", "peek", [self.name, 65536], HUB_S)
            chosen = list(choose([ItemInfo(*row) for row in rows])) if rows else []
            if chosen:
                ids = [info.id for info in chosen]
                items = ends.take_by(holder, "ids", ids, deadline_s, in_loop=False)
                if items is not None:
                    return [ends.consumer.open(item) for item in items]
                continue
            pending = Pending()
            hub.submit("broker.watch", [self.name, version], pending)
            if not ends.wait_until(pending, deadline_s, f"a choice from {self.name!r}"):
                raise stuck(ends.context, f"a choice from channel {self.name!r}", ends.limit_s(timeout_s))
            pending.result()

    def take_share(
        self,
        key: Hashable,
        *,
        rank: int,
        world_size: int,
        balance: str = "count",
        timeout_s: float | None = None,
    ) -> list[Any]:
        """This rank's share of everything put under `key`, in the producers' order, once all their parts are in.

        `balance`: "count" cuts contiguous shares of equal length, "weight" shares of equal weight.
        """
        if balance not in ("count", "weight"):
            raise ConfigError(f'{self.name}: take_share(balance={balance!r}): "count" or "weight"')
        ends, holder = self._ends(), threading.get_ident()
        pending = Pending()
        ends.consumer.request_share(pending, holder, [checked_key(self.name, key), rank, world_size, balance])
        answer = ends.wait(pending, ends.deadline(timeout_s), ("cancel_share", key))
        items = ends.consumer.accept(holder, answer[1], num_wanted=len(answer[1]), in_loop=False)
        return [ends.consumer.open(item) for item in items]

    def __iter__(self) -> Iterator[Any]:
        """Objects until the epoch ends."""
        ends, holder = self._ends(), threading.get_ident()
        try:
            while items := ends.take_front(holder, ends.deadline(None), min_items=0, in_loop=True):
                yield ends.consumer.open(items[0])
        finally:
            ends.consumer.finish(holder)
            ends.consumer.put_back()

    def batches(self) -> Iterator[list[Any]]:
        """Lists of `granularity` objects (the last may be shorter) until the epoch ends."""
        ends, holder = self._ends(), threading.get_ident()
        try:
            while items := ends.take_front(
                holder, ends.deadline(None), min_items=0, in_loop=True, is_exact=True
            ):
                yield [ends.consumer.open(item) for item in items]
        finally:
            ends.consumer.finish(holder)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Objects until the epoch ends, for an event loop."""
        ends, task = self._ends(), asyncio.current_task()
        try:
            while (item := await self._next_in_loop(ends, task)) is not None:
                yield ends.consumer.open(item)
        finally:
            ends.consumer.finish(task)
            ends.consumer.put_back()

    async def leases(self) -> AsyncIterator[Lease]:
        """As `async for` over the channel, for a consumer that works on several objects at a time: each is done when
        its own lease says so. The loop ends when the epoch has ended and every lease of it is done."""
        ends = self._ends()
        try:
            while True:
                lease = Lease(ends.consumer)
                item = await self._next_in_loop(ends, lease)
                if item is None:
                    return
                lease.value = ends.consumer.open(item)
                yield lease
        finally:
            ends.consumer.put_back()

    async def _next_in_loop(self, ends: ChannelEnds, holder: object) -> WireItem | None:
        """The next item of the consumer's epoch for this holder; None at the epoch's end."""
        item = ends.consumer.next_buffered(holder, in_loop=True)
        if item is not None:
            return item
        answer = await ends.answer(
            lambda pending: ends.consumer.request(pending, min_items=0, in_loop=True), None
        )
        if answer[0] == EPOCH_END:
            return None
        return ends.consumer.accept(holder, answer[1], num_wanted=1, in_loop=True)[0]

    def done(self) -> None:
        """Say that this thread is done with everything it has taken so far."""
        self._ends().consumer.finish(threading.get_ident())

    # --- the channel itself -------------------------------------------------------------------------------

    def set_granularity(self, granularity: int) -> None:
        """From the next chunk on, loops receive this many items at a time."""
        if granularity < 1:
            raise ConfigError(f"channel {self.name!r}: granularity={granularity}: give at least 1")
        current().hub.call("broker", "configure", [self.name, {"granularity": granularity}], HUB_S)

    def peek(self, max_items: int = 1024) -> list[ItemInfo]:
        """The first queued items, without taking them and without their payloads."""
        _, rows = current().hub.query("broker", "peek", [self.name, max_items], HUB_S)
        return [ItemInfo(*row) for row in rows]

    def stats(self) -> dict[str, Any]:
        """Depth, bytes, leases, epochs, who waits, and what each worker put and took."""
        stats: dict[str, Any] = current().hub.query("broker", "stats", self.name, HUB_S)
        return stats

    def close(self) -> None:
        """End the channel for everybody: waits end with ChannelClosedError, what is queued is dropped."""
        ends = self._ends()
        ends.producer.seal()
        ends.context.hub.call("broker", "close", self.name, HUB_S)
        ends.context.services.pop(f"channel:{self.name}", None)
        ends.consumer.close()

    def _ends(self) -> ChannelEnds:
        """This process's, or this rank's."""
        return ends_of(self._settings, current())


def _rebuild(name: str, is_bounded: bool, timeout_s: float) -> Channel:
    return Channel(ChannelSettings(name, is_bounded, timeout_s))
