"""Channel: a first-in first-out flow of objects between any producers and any consumers of a cluster.

Descriptors go through the broker (broker.py), payloads stay in shared memory where they were produced (store.py). A
handle can be pickled and passed to workers; every process opens its own ports at first use.

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
  over when its group was launched; `join()` begins with the running one instead.
- Objects are built on shared memory without a copy; the memory is used again only when nothing looks at it any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import ConfigError, RunError
from rill.runtime.consumer_port import ConsumerPort, WireItem
from rill.runtime.context import RuntimeContext, current
from rill.runtime.gpu_payload import gpu_export
from rill.runtime.grants import EPOCH_END, ITEMS, NOTHING
from rill.runtime.hub_client import Pending
from rill.runtime.lock import lock_of
from rill.runtime.producer_port import INLINE_BYTES, Descriptor, ProducerPort
from rill.runtime.report import stuck, waiting
from rill.runtime.wire import encode

if TYPE_CHECKING:
    from rill.runtime.cluster import Cluster

DEFAULT_TIMEOUT_S = 600.0
_HUB_S = 30.0


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

    def __init__(self, name: str, *, is_bounded: bool, offload: bool, timeout_s: float) -> None:
        """Use `Channel.create`; this rebuilds a handle of a channel that exists."""
        self.name = name
        self._is_bounded = is_bounded
        self._offload = offload
        self._timeout_s = timeout_s

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
        offload: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Channel:
        """Make a channel in `cluster` (None: the cluster of this process).

        `granularity`: items that loops receive at a time; a plan sets it, worker code never mentions it.
        `offload`: GPU tensors wait in host memory and arrive on their consumer's own device; False leaves them on the
        GPU, for consumers that see the same one. `producers`: how many processes end an epoch (see above).
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
        context.hub.call("broker", "create", [name, options], _HUB_S)
        is_bounded = capacity_items is not None or capacity_bytes is not None
        return cls(name, is_bounded=is_bounded, offload=offload, timeout_s=timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.name, self._is_bounded, self._offload, self._timeout_s)

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    # --- putting ------------------------------------------------------------------------------------------

    def put(
        self, obj: Any, weight: float = 1.0, key: Hashable | None = None, timeout_s: float | None = None
    ) -> None:
        """Put one object. On a bounded channel returns when it is in; otherwise when it is on its way."""
        if key is not None:
            key = _checked_key(self.name, key)
        if self._is_bounded:
            self._put_all([(obj, weight)], key, timeout_s)
            return
        ends, deadline_s = _ends(self, current()), self._deadline(timeout_s)
        if not ends.producer.put(self._descriptor(ends, obj, weight, key, deadline_s), deadline_s):
            raise stuck(ends.context, f"put to channel {self.name!r}", timeout_s or self._timeout_s)

    def put_many(
        self, objects: Sequence[Any], weights: Sequence[float] | None = None, timeout_s: float | None = None
    ) -> None:
        """Put several objects with one message."""
        if weights is None:
            weights = [1.0] * len(objects)
        if len(weights) != len(objects):
            raise ConfigError(f"{self.name}: put_many got {len(objects)} objects and {len(weights)} weights")
        self._put_all(list(zip(objects, weights, strict=True)), None, timeout_s)

    async def put_async(
        self, obj: Any, weight: float = 1.0, key: Hashable | None = None, timeout_s: float | None = None
    ) -> None:
        """As `put`, without blocking the event loop while the channel is full."""
        key = _checked_key(self.name, key)
        if not self._is_bounded:
            self._put_all([(obj, weight)], key, timeout_s)
            return
        await asyncio.to_thread(self._put_all, [(obj, weight)], key, timeout_s, current())

    def put_share(
        self, key: Hashable, objects: Sequence[Any], *, rank: int, world_size: int, weights: Any = None
    ) -> None:
        """This rank's part of a redistribution named `key`; `take_share` cuts the whole for other sizes."""
        ends = _ends(self, current())
        descriptors = [
            self._descriptor(ends, obj, 1.0 if weights is None else weights[n], None, self._deadline(None))
            for n, obj in enumerate(objects)
        ]
        ends.context.hub.call(
            "broker",
            "put_share",
            [self.name, _checked_key(self.name, key), rank, world_size, descriptors],
            _HUB_S,
        )

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything put by this process is with the broker, and would survive this process."""
        _ends(self, current()).producer.flush(timeout_s or self._timeout_s)

    def end(self) -> None:
        """End the epoch (see above for whose call counts). The next epoch may begin at once."""
        ends = _ends(self, current())
        ends.producer.seal()
        ends.context.hub.call("broker", "end", self.name, _HUB_S)

    # --- taking -------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None = None, *, keys: Sequence[Hashable] | None = None) -> Any:
        """The next object, of whatever epoch; with `keys`, the list of exactly those, once all of them are there."""
        ends, holder = _ends(self, current()), threading.get_ident()
        if keys is not None:
            found = self._take_by(
                ends,
                holder,
                "keys",
                [_checked_key(self.name, k) for k in keys],
                self._deadline(timeout_s),
                in_loop=False,
            )
            return [ends.consumer.open(item) for item in found or ()]
        items = self._take_front(ends, holder, self._deadline(timeout_s), min_items=1, in_loop=False)
        assert items
        return ends.consumer.open(items[0])

    async def take_async(self, timeout_s: float | None = None) -> Any:
        """As `take` on an event loop: what a task took is done when it takes again or ends."""
        ends, task = _ends(self, current()), asyncio.current_task()
        item = ends.consumer.next_buffered(task, in_loop=False)
        if item is None:
            pending, future = ends.context.hub.future()
            ends.consumer.request(pending, min_items=1, in_loop=False)
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            try:
                await asyncio.wait_for(future, limit_s)
            except (TimeoutError, asyncio.CancelledError) as error:
                if ends.consumer.give_up(pending, "cancel_take"):
                    if isinstance(error, TimeoutError):
                        raise stuck(ends.context, f"take from channel {self.name!r}", limit_s) from None
                    raise
            (item,) = ends.consumer.accept(task, pending.result()[1], num_wanted=1, in_loop=False)
        if task is not None:
            ends.consumer.finish_with(task)
        return ends.consumer.open(item)

    def take_batch(
        self, *, weight: float | None = None, count: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Objects whose weights reach `weight`, or `count` objects; fewer when the epoch ends, none after its end."""
        if (weight is None) == (count is None):
            raise ConfigError(f"{self.name}: take_batch needs one of weight= and count=")
        ends, holder = _ends(self, current()), threading.get_ident()
        deadline_s = self._deadline(timeout_s)
        if weight is not None:
            items = self._take_by(ends, holder, "weight", float(weight), deadline_s, in_loop=True)
        else:
            assert count is not None
            items = self._take_front(ends, holder, deadline_s, min_items=count, in_loop=True, is_exact=True)
        return [ends.consumer.open(item) for item in items or ()]

    def take_chosen(self, choose: Choice, timeout_s: float | None = None) -> list[Any]:
        """What `choose` picks of the queued items. It runs here, again and again until it picks something that is
        still there; several consumers may choose at the same time."""
        ends, holder = _ends(self, current()), threading.get_ident()
        deadline_s = self._deadline(timeout_s)
        hub = ends.context.hub
        while True:
            version, rows = hub.query("broker", "peek", [self.name, 65536], _HUB_S)
            chosen = list(choose([ItemInfo(*row) for row in rows])) if rows else []
            if chosen:
                ids = [info.id for info in chosen]
                items = self._take_by(ends, holder, "ids", ids, deadline_s, in_loop=False)
                if items is not None:
                    return [ends.consumer.open(item) for item in items]
                continue
            pending = Pending()
            hub.submit("broker.watch", [self.name, version], pending)
            if not _await(ends.context, pending, deadline_s, f"a choice from {self.name!r}", self.name):
                raise stuck(
                    ends.context, f"a choice from channel {self.name!r}", timeout_s or self._timeout_s
                )
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
        ends, holder = _ends(self, current()), threading.get_ident()
        pending = Pending()
        ends.consumer.request_share(
            pending, holder, [_checked_key(self.name, key), rank, world_size, balance]
        )
        answer = self._wait(ends, pending, self._deadline(timeout_s), ("cancel_share", key))
        items = ends.consumer.accept(holder, answer[1], num_wanted=len(answer[1]), in_loop=False)
        return [ends.consumer.open(item) for item in items]

    def __iter__(self) -> Iterator[Any]:
        """Objects until the epoch ends."""
        ends, holder = _ends(self, current()), threading.get_ident()
        try:
            while items := self._take_front(ends, holder, self._deadline(None), min_items=0, in_loop=True):
                yield ends.consumer.open(items[0])
        finally:
            ends.consumer.finish(holder)
            ends.consumer.put_back()

    def batches(self) -> Iterator[list[Any]]:
        """Lists of `granularity` objects (the last may be shorter) until the epoch ends."""
        ends, holder = _ends(self, current()), threading.get_ident()
        try:
            while items := self._take_front(
                ends, holder, self._deadline(None), min_items=0, in_loop=True, is_exact=True
            ):
                yield [ends.consumer.open(item) for item in items]
        finally:
            ends.consumer.finish(holder)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Objects until the epoch ends, for an event loop."""
        ends, task = _ends(self, current()), asyncio.current_task()
        try:
            while (item := await self._next_in_loop(ends, task)) is not None:
                yield ends.consumer.open(item)
        finally:
            ends.consumer.finish(task)
            ends.consumer.put_back()

    async def leases(self) -> AsyncIterator[Lease]:
        """As `async for` over the channel, for a consumer that works on several objects at a time: each is done when
        its own lease says so. The loop ends when the epoch has ended and every lease of it is done."""
        ends = _ends(self, current())
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

    async def _next_in_loop(self, ends: _Ends, holder: object) -> WireItem | None:
        """The next item of the consumer's epoch for this holder; None at the epoch's end."""
        item = ends.consumer.next_buffered(holder, in_loop=True)
        if item is not None:
            return item
        pending, future = ends.context.hub.future()
        ends.consumer.request(pending, min_items=0, in_loop=True)
        try:
            await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            if ends.consumer.give_up(pending, "cancel_take"):
                raise stuck(ends.context, f"channel {self.name!r}", self._timeout_s) from None
        answer = pending.result()
        if answer[0] == EPOCH_END:
            return None
        return ends.consumer.accept(holder, answer[1], num_wanted=1, in_loop=True)[0]

    def done(self) -> None:
        """Say that this thread is done with everything it has taken so far."""
        _ends(self, current()).consumer.finish(threading.get_ident())

    def join(self) -> None:
        """As a consumer that came late: begin with the epoch that is running."""
        current().hub.call("broker", "join", self.name, _HUB_S)

    # --- the channel itself -------------------------------------------------------------------------------

    def set_granularity(self, granularity: int) -> None:
        """From the next chunk on, loops receive this many items at a time."""
        if granularity < 1:
            raise ConfigError(f"channel {self.name!r}: granularity={granularity}: give at least 1")
        current().hub.call("broker", "configure", [self.name, {"granularity": granularity}], _HUB_S)

    def peek(self, max_items: int = 1024) -> list[ItemInfo]:
        """The first queued items, without taking them and without their payloads."""
        _, rows = current().hub.query("broker", "peek", [self.name, max_items], _HUB_S)
        return [ItemInfo(*row) for row in rows]

    def stats(self) -> dict[str, Any]:
        """Depth, bytes, leases, epochs, who waits, and what each worker put and took."""
        stats: dict[str, Any] = current().hub.query("broker", "stats", self.name, _HUB_S)
        return stats

    def close(self) -> None:
        """End the channel for everybody: waits end with ChannelClosedError, what is queued is dropped."""
        ends = _ends(self, current())
        ends.producer.seal()
        ends.context.hub.call("broker", "close", self.name, _HUB_S)
        ends.context.services.pop(f"channel:{self.name}", None)
        ends.consumer.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _descriptor(self, ends: _Ends, obj: Any, weight: float, key: Any, deadline_s: float) -> Descriptor:
        export = None if self._offload else gpu_export()
        encoded = encode(obj, device_hook=export)
        weight = float(weight)
        is_on_gpu = export is not None and bool(export.kept)
        if encoded.num_bytes <= INLINE_BYTES and not is_on_gpu:
            inline: Any = encoded.header
            if encoded.buffers:
                inline = [encoded.header, *(bytes(buffer) for buffer in encoded.buffers)]
            return [weight, key, encoded.num_bytes, inline, None]
        ref = ends.context.store.write(encoded, max(0.0, deadline_s - time.monotonic()))
        if export is not None and is_on_gpu:
            ends.context.store.pin(ref, export.kept)
        return [weight, key, encoded.num_bytes, None, ref]

    def _put_all(
        self,
        weighted: list[tuple[Any, float]],
        key: Any,
        timeout_s: float | None,
        context: RuntimeContext | None = None,
    ) -> None:
        ends = _ends(self, context or current())
        deadline_s = self._deadline(timeout_s)
        descriptors = [self._descriptor(ends, obj, weight, key, deadline_s) for obj, weight in weighted]
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._is_bounded:
            for n, descriptor in enumerate(descriptors):
                if not ends.producer.put(descriptor, deadline_s):
                    raise stuck(
                        ends.context, f"put {n} of {len(descriptors)} to channel {self.name!r}", limit_s
                    )
            return
        pending = ends.producer.put_bounded(descriptors)
        what = f"room in channel {self.name!r} for {len(descriptors)} items"
        if _await(ends.context, pending, deadline_s, what, self.name):
            pending.result()
            return
        error = stuck(ends.context, what, limit_s)  # while it still waits, so that the report shows it
        ends.producer.cancel(pending)
        if not pending.wait(_HUB_S):
            raise RunError(f"{self.name}: the hub does not answer: it is not known whether the put got in")
        num_left_out = pending.result()
        if num_left_out:
            error.add_note(f"{len(descriptors) - num_left_out} of {len(descriptors)} items got in")
            raise error

    def _take_front(
        self,
        ends: _Ends,
        holder: object,
        deadline_s: float,
        *,
        min_items: int,
        in_loop: bool,
        is_exact: bool = False,
    ) -> list[WireItem] | None:
        """Items from the front; None at the epoch's end. `is_exact` gives a whole chunk, otherwise one item."""
        item = ends.consumer.next_buffered(holder, in_loop=in_loop)
        if item is not None:
            return [item]
        pending = Pending()
        ends.consumer.request(pending, min_items=min_items, in_loop=in_loop)
        kind, items, granularity = self._wait(ends, pending, deadline_s, ("cancel_take",))
        if kind == EPOCH_END:
            return None
        num_wanted = max(min_items, granularity if min_items == 0 else 1) if is_exact else 1
        return ends.consumer.accept(holder, items, num_wanted=num_wanted, in_loop=in_loop)

    def _take_by(
        self, ends: _Ends, holder: object, how: str, argument: Any, deadline_s: float, *, in_loop: bool
    ) -> list[WireItem] | None:
        pending = Pending()
        ends.consumer.request_by(pending, holder, how, argument, in_loop=in_loop)
        kind, items, _ = self._wait(ends, pending, deadline_s, ("cancel_take",))
        if kind in (EPOCH_END, NOTHING):
            return None
        assert kind == ITEMS
        return ends.consumer.accept(holder, items, num_wanted=len(items), in_loop=in_loop)

    def _wait(self, ends: _Ends, pending: Pending, deadline_s: float, cancel: tuple[Any, ...]) -> Any:
        started_s = time.monotonic()
        what = f"take from channel {self.name!r}"
        if not _await(ends.context, pending, deadline_s, what, self.name):
            error = stuck(ends.context, what, deadline_s - started_s)
            if ends.consumer.give_up(pending, *cancel):
                raise error
        return pending.result()


class _Ends:
    """This process's ports of one channel."""

    def __init__(self, channel: Channel, context: RuntimeContext) -> None:
        self.context = context
        hub, store = context.hub, context.store
        self.producer = ProducerPort(hub, store, channel.name)
        self.consumer = ConsumerPort(
            hub, store, channel.name, reads_ahead=not channel._is_bounded, device=context.torch_device
        )

    def close(self) -> None:
        self.producer.seal()
        self.consumer.put_back()
        self.consumer.close()


def _await(context: RuntimeContext, pending: Pending, deadline_s: float, what: str, channel: str) -> bool:
    """Wait by name; a device lock held here may be lent meanwhile, and is held again afterwards."""
    if pending.wait(0.0):
        return True
    with waiting(what, f"channel:{channel}"):
        lock = lock_of(context)
        if lock is None or not lock.is_held:
            return pending.wait(deadline_s - time.monotonic())
        with lock.lending():
            return pending.wait(deadline_s - time.monotonic())


def _ends(channel: Channel, context: RuntimeContext) -> _Ends:
    key = f"channel:{channel.name}"
    ends: _Ends | None = context.services.get(key)
    if ends is None:
        with context.lock:
            ends = context.services.get(key)
            if ends is None:
                ends = _Ends(channel, context)
                context.services[key] = ends
    return ends


def _checked_key(channel: str, key: Any) -> Any:
    if key is None or isinstance(key, (str, int, float, bool)):
        return key
    if isinstance(key, tuple):
        return tuple(_checked_key(channel, part) for part in key)
    raise ConfigError(
        f"{channel}: a key is text, a number or a tuple of them; got {type(key).__name__}: {key!r}"
    )


def _rebuild(name: str, is_bounded: bool, offload: bool, timeout_s: float) -> Channel:
    return Channel(name, is_bounded=is_bounded, offload=offload, timeout_s=timeout_s)


def flush_puts(context: RuntimeContext) -> None:
    """A call is about to answer: whoever hears of it, and ends the epoch say, finds in the channels what it put."""
    for service in list(context.services.values()):
        if isinstance(service, _Ends) and service.producer.has_unconfirmed:
            service.producer.flush(_HUB_S)


def finish_call(context: RuntimeContext) -> None:
    """A call that ran in this thread has returned: it is done with everything it took. The worker's host calls this."""
    holder = threading.get_ident()
    for service in list(context.services.values()):
        if isinstance(service, _Ends):
            service.consumer.finish(holder)
