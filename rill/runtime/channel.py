"""Channel: a first-in first-out flow of objects between any producers and any consumers of a cluster.

    producers ──put──▶ [ broker: items, leases, epochs ] ──take──▶ consumers
        └──────────── payload: shared memory of the producer's node ────────────┘

A handle can be pickled and passed to workers; every process opens its own ends at first use (channels/). Guarantees:
- An item is leased to one live consumer at a time. A loop's item is finished when the loop goes on, together with
  everything its body has put: one record, all or nothing. If the consumer dies before that, or its call fails, the item
  goes back to the front and nothing of it was put. `take` finishes what the same thread took before.
- An item at which consumers failed `max_failures` times is set aside and named in `stats`.
- What one producer puts is taken in that order. `flush`: everything put so far would survive this process.
- `capacity_items` and `capacity_bytes` bound what waits in the channel; `put` on a full channel waits.
- Epochs: `end()` ends the current one, when called once by the channel's creator, or by every rank of every group that
  has put into it. A loop ends when its epoch has ended and all its items are finished.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rill.errors import ConfigError
from rill.runtime.channels.consumer import Consumer
from rill.runtime.channels.lease import Lease, before_wait, end_call, finish_taken, join, unjoin
from rill.runtime.channels.producer import Producer, checked_key
from rill.runtime.context import RuntimeContext, current
from rill.runtime.hub.messages import ChannelOptions, Take

if TYPE_CHECKING:
    from rill.runtime.cluster import Cluster

__all__ = ["Channel", "Lease"]

DEFAULT_TIMEOUT_S = 600.0


class Channel:
    """A handle."""

    def __init__(self, name: str, is_bounded: bool, timeout_s: float, epoch: int | None = None) -> None:
        """Use `Channel.create`; this rebuilds a handle of a channel that exists."""
        self.name = name
        self.timeout_s = timeout_s
        """Deadline of every wait but a `take` with one of its own."""
        self._is_bounded = is_bounded
        self._epoch = epoch

    @classmethod
    def create(
        cls,
        cluster: Cluster | None,
        name: str,
        *,
        capacity_items: int | None = None,
        capacity_bytes: int | None = None,
        max_failures: int = 3,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Channel:
        """Make a channel in `cluster` (None: the cluster of this process).

        `max_failures`: how often consumers may fail at an item before it is set aside.
        `timeout_s`: deadline of every wait but a `take` with one of its own.
        """
        options = ChannelOptions(name, capacity_items, capacity_bytes, max_failures)
        for what in ("capacity_items", "capacity_bytes", "max_failures"):
            value = getattr(options, what)
            if value is not None and value < 1:
                raise ConfigError(f"channel {name!r}: {what}={value}: give at least 1")
        context = current() if cluster is None else cluster.context
        context.hub.call("broker.create", options)
        return cls(name, options.is_bounded, timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return Channel, (self.name, self._is_bounded, self.timeout_s, self._epoch)

    def of_epoch(self, number: int) -> Channel:
        """The same, for loops over this epoch, counted from 0: they meet its end however often it was met before. For
        whoever calls a consumer again that died before it was heard of."""
        return Channel(self.name, self._is_bounded, self.timeout_s, number)

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    def put(self, obj: Any, weight: float = 1.0, key: Hashable | None = None) -> None:
        """Put one object. Inside a loop's body or a lease it goes when that is done; else, on a bounded channel this
        returns when it is in, otherwise when it is on its way."""
        producer = self._producer
        producer.put([producer.describe(obj, weight, key)])

    def put_many(self, objects: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        if weights is not None and len(weights) != len(objects):
            raise ConfigError(f"{self.name}: put_many got {len(objects)} objects and {len(weights)} weights")
        producer = self._producer
        weighted = zip(objects, weights or [1.0] * len(objects), strict=True)
        producer.put([producer.describe(obj, weight, None) for obj, weight in weighted])

    async def put_async(self, obj: Any, weight: float = 1.0, key: Hashable | None = None) -> None:
        """As `put`, without blocking the event loop while the channel is full."""
        producer = self._producer
        await producer.put_async([producer.describe(obj, weight, key)])

    def flush(self) -> None:
        """Return when everything put by this process is with the broker, and would survive this process."""
        before_wait()
        producer = self._producer
        current().hub.sync(self.timeout_s)
        producer.check()

    def end(self) -> None:
        """End the epoch (see above for whose call counts). The next epoch may begin at once."""
        before_wait()
        current().hub.call("broker.end", self.name)

    def take(self, timeout_s: float | None = None, *, keys: Sequence[Hashable] | None = None) -> Any:
        """The next object, of whatever epoch; with `keys`, the list of exactly those, once all of them are there."""
        wanted = None if keys is None else [checked_key(self.name, key) for key in keys]
        consumer = self._consumer
        finish_taken(consumer)
        take = Take(self.name, keys=wanted)
        _, values = consumer.take(take, self.timeout_s if timeout_s is None else timeout_s)
        return values[0] if keys is None else values

    def __iter__(self) -> Iterator[Any]:
        """Objects until the epoch ends. Each is finished, with what the body put, when the loop goes on."""
        consumer = self._consumer
        finish_taken(consumer)
        take = Take(self.name, in_loop=True, epoch=self._epoch)
        try:
            while True:
                lease, values = consumer.take(take, self.timeout_s)
                if lease is None:
                    return
                join(lease)
                try:
                    yield values.pop()
                except GeneratorExit:
                    lease.is_left = True  # by `break` or an exception: what comes next will tell
                    raise
                unjoin(lease)
                lease.done()
        finally:
            consumer.return_ahead()

    async def leases(self) -> AsyncIterator[Lease]:
        """Objects until the epoch ends, for an event loop that works on several at a time: each is done when its own
        lease says so (`async with lease`, or `lease.done()`)."""
        consumer = self._consumer
        take = Take(self.name, in_loop=True, epoch=self._epoch)
        try:
            while True:
                lease, values = await consumer.take_async(take, self.timeout_s)
                if lease is None:
                    return
                (lease.value,) = values
                yield lease
                del lease, values
        finally:
            consumer.return_ahead()

    def stats(self) -> dict[str, Any]:
        """Depth, bytes, leases, epochs, who waits, what each worker put and took, and what was set aside."""
        stats: dict[str, Any] = current().hub.call("broker.stats", self.name)
        return stats

    def close(self) -> None:
        """End the channel for everybody: waits end with ChannelClosedError, what is queued is dropped."""
        context = current()
        context.hub.call("broker.close", self.name)
        consumer = context.channels.pop(self.name, None)
        if consumer is not None:
            consumer.close()

    @property
    def _consumer(self) -> Consumer:
        """This process's end, made at its first use of the channel."""
        context = current()
        with context.lock:
            if self.name not in context.channels:
                producer = Producer(context, self.name, self._is_bounded, self.timeout_s)
                context.channels[self.name] = Consumer(context, producer)
            return context.channels[self.name]

    @property
    def _producer(self) -> Producer:
        return self._consumer.producer


def settle_call(context: RuntimeContext) -> None:
    """A call that ran in this thread is about to answer: it is done with what it took, and when this returns the broker
    knows that and has what it put. Whoever hears the answer may end the epoch, or kill the process, and nothing is
    lost or delivered again."""
    end_call(None)
    consumers = list(context.channels.values())
    has_passed = [consumer.pass_end() for consumer in consumers]
    if any(has_passed) or (consumers and context.hub.has_unconfirmed):
        context.hub.sync()
        for consumer in consumers:
            consumer.producer.check()
