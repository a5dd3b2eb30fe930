"""One channel inside the broker: its queue of descriptors, its leases, its epochs and who waits on it.

Pure state, no output: `Broker` calls it, sends what it grants, and asks `serve` again after every change.

An item's life:   put ──▶ QUEUED ──take──▶ LEASED ──done──▶ HELD ──release──▶ gone
                            ▲                 │               (its memory is still looked at; inline items skip it)
                            └── consumer died or gave it back

Epochs: an item belongs to the epoch its producer was in. Consumers' loops are in an epoch each and end when it has
ended and every item of it is done, so that a dead consumer's items still find somebody in the loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from rill.runtime.transfer.ref import Ref

QUEUED, LEASED, HELD = 0, 1, 2


class Item:
    """A descriptor: everything but the payload."""

    __slots__ = (
        "epoch",
        "holder",
        "id",
        "inline",
        "is_released",
        "key",
        "num_bytes",
        "producer",
        "ref",
        "share",
        "state",
        "weight",
    )

    def __init__(
        self,
        item_id: int,
        epoch: int,
        producer: str,
        weight: float,
        key: Any,
        num_bytes: int,
        inline: Any,
        ref: Ref | None,
    ) -> None:
        self.id = item_id
        self.epoch = epoch
        self.producer = producer
        self.weight = weight
        self.key = key
        self.num_bytes = num_bytes
        self.inline = inline
        """The encoded payload itself when it is small."""
        self.ref = ref
        """Where the payload lies otherwise: see store.py."""
        self.state = QUEUED
        self.holder = ""
        self.is_released = False
        """Its consumer looks at the memory no more, though it is not done yet."""
        self.share: Any = None
        """(key, consumer rank) when it belongs to a redistribution (shares.py)."""

    def wire(self) -> tuple[Any, ...]:
        return (self.id, self.weight, self.key, self.num_bytes, self.inline, self.ref)


class PutWait:
    """Items that wait for room."""

    __slots__ = ("client", "items", "seq", "since_s")

    def __init__(self, client: str, seq: int, items: list[Item], since_s: float) -> None:
        self.client = client
        self.seq = seq
        self.items = items
        self.since_s = since_s


class TakeWait:
    """A consumer that waits for items."""

    __slots__ = (
        "at_once",
        "client",
        "ids",
        "in_loop",
        "keys",
        "max_items",
        "min_items",
        "seq",
        "since_s",
        "weight",
    )

    def __init__(self, client: str, seq: int, since_s: float) -> None:
        self.client = client
        self.seq = seq
        self.since_s = since_s
        self.min_items = 1
        self.max_items = 1
        self.at_once = 1
        self.weight: float | None = None
        """Take items until their weights reach this."""
        self.keys: list[Any] | None = None
        """Take exactly one item of each key."""
        self.ids: list[int] | None = None
        """Take exactly these items, or nothing when one of them is gone (a consumer's own choice)."""
        self.in_loop = False
        """Bounded by the consumer's epoch; may be answered with the epoch's end."""


class ChannelState:
    """Queues by epoch, leases, epochs, waits, counters."""

    def __init__(self, name: str, options: dict[str, Any], creator: str) -> None:
        self.name = name
        self.creator = creator
        self.capacity_items: int | None = options["capacity_items"]
        self.capacity_bytes: int | None = options["capacity_bytes"]
        self.granularity: int = options["granularity"]
        self.num_producers: int | None = options["producers"]
        self.is_closed = False
        self.items: dict[int, Item] = {}
        self.next_id = 1
        self.queues: dict[int, deque[int]] = {0: deque()}
        self.by_key: dict[Any, deque[int]] = {}
        self.num_queued = 0
        self.queued_bytes = 0
        self.version = 0
        """Counts changes of what is queued; consumers with a choice of their own watch it."""
        self.epoch = 0
        self.unfinished: dict[int, int] = {}
        self.num_drained = 0
        self.drained_at: list[int] = []
        self.producer_epoch: dict[str, int] = {}
        self.ended_by: dict[int, set[str]] = {}
        self.consumer_epoch: dict[str, int] = {}
        self.puts: deque[PutWait] = deque()
        self.takes: list[TakeWait] = []
        self.watches: list[tuple[str, int]] = []
        self.producers: dict[str, list[float]] = {}
        """worker name -> [items put, bytes put, last time]; consumers likewise: the traced graph."""
        self.consumers: dict[str, list[float]] = {}
        self.num_redelivered = 0

    # --- putting ------------------------------------------------------------------------------------------

    def new_item(self, producer: str, descriptor: list[Any]) -> Item:
        weight, key, num_bytes, inline, ref = descriptor
        epoch = max(self.producer_epoch.get(producer, 0), self.epoch)
        where = None if ref is None else Ref.of(ref)
        item = Item(self.next_id, epoch, producer, weight, as_key(key), num_bytes, inline, where)
        self.next_id += 1
        self.unfinished[epoch] = self.unfinished.get(epoch, 0) + 1
        return item

    def has_room_for(self, item: Item) -> bool:
        """An empty queue admits anything, so a capacity below one item's size cannot block for ever."""
        if self.num_queued == 0:
            return True
        if self.capacity_items is not None and self.num_queued >= self.capacity_items:
            return False
        return self.capacity_bytes is None or self.queued_bytes + item.num_bytes <= self.capacity_bytes

    def admit(self, items: Sequence[Item], now_s: float) -> None:
        """Let items of one producer in."""
        for item in items:
            self.items[item.id] = item
            self._enqueue(item)
        self.count_put(items[0].producer, items, now_s)

    def count_put(self, producer: str, items: Sequence[Item], now_s: float) -> None:
        counts = self.producers.setdefault(producer, [0, 0, 0.0])
        for item in items:
            counts[0] += 1
            counts[1] += item.num_bytes
        counts[2] = now_s

    def _enqueue(self, item: Item, *, at_front: bool = False) -> None:
        item.state = QUEUED
        item.holder = ""
        item.is_released = False
        queue = self.queues.get(item.epoch)
        if queue is None:
            queue = self.queues[item.epoch] = deque()
        if at_front:
            queue.appendleft(item.id)
        else:
            queue.append(item.id)
        if len(queue) > 4 * self.num_queued + 256:  # mostly entries of items taken by key
            self.queues[item.epoch] = deque(i for i in dict.fromkeys(queue) if self._is_queued(i))
        if item.key is not None:
            ids = self.by_key.setdefault(item.key, deque())
            if at_front:
                ids.appendleft(item.id)
            else:
                ids.append(item.id)
        self.num_queued += 1
        self.queued_bytes += item.num_bytes
        self.version += 1

    def _is_queued(self, item_id: int) -> bool:
        item = self.items.get(item_id)
        return item is not None and item.state == QUEUED

    # --- taking -------------------------------------------------------------------------------------------

    def lease(self, item: Item, client: str) -> None:
        """Hand a queued item out. Its entry in the queue goes stale and is skipped later."""
        item.state = LEASED
        item.holder = client
        self.num_queued -= 1
        self.queued_bytes -= item.num_bytes
        self.version += 1
        if item.key is not None:
            ids = self.by_key[item.key]
            if ids[0] == item.id:
                ids.popleft()
            else:
                ids.remove(item.id)
            if not ids:
                del self.by_key[item.key]

    def front(self, last_epoch: int, max_items: int, weight: float | None) -> tuple[list[Item], float]:
        """The first queued items of epochs up to `last_epoch`, until `max_items` or `weight` is reached."""
        found: list[Item] = []
        total = 0.0
        items = self.items
        for epoch in sorted(self.queues):
            if epoch > last_epoch:
                break
            queue = self.queues[epoch]
            while queue and (queue[0] not in items or items[queue[0]].state != QUEUED):
                queue.popleft()
            seen: set[int] = set()
            for item_id in queue:
                item = items.get(item_id)
                if item is None or item.state != QUEUED or item_id in seen:
                    continue
                if weight is None:
                    if len(found) >= max_items:
                        return found, total
                elif total >= weight:
                    return found, total
                seen.add(item_id)
                found.append(item)
                total += item.weight
        return found, total

    def requeue(self, items: list[Item]) -> None:
        """Back to the front, in their old order."""
        for item in sorted(items, key=lambda i: i.id, reverse=True):
            self._enqueue(item, at_front=True)

    def finish(self, item: Item, now_s: float) -> None:
        """The consumer is done with it: it will never be delivered again."""
        counts = self.consumers.setdefault(item.holder.partition("#")[0], [0, 0, 0.0])
        counts[0] += 1
        counts[1] += item.num_bytes
        counts[2] = now_s
        left = self.unfinished[item.epoch] - 1
        if left:
            self.unfinished[item.epoch] = left
        else:
            del self.unfinished[item.epoch]
        item.state = HELD

    # --- epochs -------------------------------------------------------------------------------------------

    def end_epoch(self, num_events: int) -> None:
        """Every producer has ended the current epoch."""
        self.ended_by.pop(self.epoch, None)
        self.epoch += 1
        self.drain(num_events)

    def drain(self, num_events: int) -> None:
        """Count epochs that have ended and whose items are all done."""
        while self.num_drained < self.epoch and self.num_drained not in self.unfinished:
            self.queues.pop(self.num_drained, None)
            self.num_drained += 1
            self.drained_at.append(num_events)

    def epochs_drained_before(self, event: int) -> int:
        """How many epochs were over at that event: where a consumer that came then begins."""
        return bisect_right(self.drained_at, event)


def as_key(key: Any) -> Any:
    """Keys are text, numbers, or tuples of them; a tuple travels as a list."""
    return tuple(as_key(part) for part in key) if isinstance(key, list) else key
