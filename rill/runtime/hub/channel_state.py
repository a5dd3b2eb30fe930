"""One channel inside the broker: its queue of descriptors, its leases, its epochs and who waits on it.

Pure state, no output: `Broker` calls it, sends what it grants, and serves it again after every change.

An item's life:   put ──▶ QUEUED ──take──▶ LEASED ──done──▶ HELD ──release──▶ gone
                            ▲                 │               (its memory is still looked at; inline items skip it)
                            ├── consumer died, or never began it
                            └── consumer failed at it ── too often ──▶ set aside: named, and done with

Epochs: an item belongs to the epoch its producer was in. Consumers' loops are in an epoch each and end when it has
ended and every item of it is done, so that a dead consumer's items still find somebody in the loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from rill.runtime.address import group_of
from rill.runtime.hub.history import Flowed
from rill.runtime.hub.messages import ChannelOptions, Item, Take

MAX_NAMED = 100
"""Of the items that were set aside, so many are kept by name."""


class ItemState(IntEnum):
    QUEUED = 0
    LEASED = 1
    HELD = 2


@dataclass(slots=True, eq=False)
class Entry:
    epoch: int
    producer: str
    item: Item
    state: ItemState = ItemState.QUEUED
    holder: str = ""
    """The client that leases it, or looks at its memory."""
    is_released: bool = False
    """Its consumer looks at the memory no more, though it is not done yet."""
    num_failures: int = 0


Queue: TypeAlias = OrderedDict[int, Entry]
"""Items by their ids, the next one first."""


class PutWait(NamedTuple):
    """Items that wait for room. They are the channel's already: their producer may die."""

    client: str
    seq: int
    entries: deque[Entry]
    since_s: float


class TakeWait(NamedTuple):
    client: str
    seq: int
    take: Take
    since_s: float


class ChannelState:
    """Queues by epoch, leases, epochs, waits, counters."""

    def __init__(self, options: ChannelOptions, creator: str) -> None:
        self.options = options
        self.name = options.name
        self.creator = creator
        self.is_closed = False
        self.items: dict[int, Entry] = {}
        self.next_id = 1
        self.queues: dict[int, Queue] = {}
        """By epoch."""
        self.by_key: dict[Any, Queue] = {}
        self.num_queued = 0
        self.queued_bytes = 0
        self.epoch = 0
        self.unfinished: dict[int, int] = {}
        """epoch -> items of it that are not done."""
        self.num_drained = 0
        self.drained_at: list[int] = []
        self.producer_epoch: dict[str, int] = {}
        self.put_in_epoch: dict[int, set[str]] = {}
        self.ended_by: dict[int, set[str]] = {}
        self.consumer_epoch: dict[str, int] = {}
        self.passing: set[str] = set()
        """Clients that were told of an epoch's end and have not said what came of it: dead, they meet it again."""
        self.puts: deque[PutWait] = deque()
        self.takes: list[TakeWait] = []
        self.producers: defaultdict[str, Flowed] = defaultdict(Flowed)
        self.consumers: defaultdict[str, Flowed] = defaultdict(Flowed)
        self.num_redelivered = 0
        self.num_set_aside = 0
        self.set_aside: list[dict[str, Any]] = []

    def new_entry(self, producer: str, item: Item) -> Entry:
        epoch = max(self.producer_epoch.get(producer, 0), self.epoch)
        item.id, item.key = self.next_id, as_key(item.key)
        entry = Entry(epoch, producer, item)
        self.next_id += 1
        self.unfinished[epoch] = self.unfinished.get(epoch, 0) + 1
        self.put_in_epoch.setdefault(epoch, set()).add(producer)
        return entry

    def has_room_for(self, entry: Entry) -> bool:
        """An empty queue admits anything, so a capacity below one item's size cannot block for ever."""
        options = self.options
        if self.num_queued == 0:
            return True
        if options.capacity_items is not None and self.num_queued >= options.capacity_items:
            return False
        num_bytes = self.queued_bytes + entry.item.num_bytes
        return options.capacity_bytes is None or num_bytes <= options.capacity_bytes

    def admit(self, entry: Entry) -> None:
        self.items[entry.item.id] = entry
        self.enqueue(entry)
        self.producers[entry.producer].count(entry.item.num_bytes, entry.item.weight)

    def drop(self, entry: Entry) -> None:
        """It never got in, or is not wanted any more: its epoch does not wait for it."""
        self.items.pop(entry.item.id, None)
        self._count_down(entry.epoch)

    def enqueue(self, entry: Entry, *, at_front: bool = False) -> None:
        entry.state = ItemState.QUEUED
        entry.holder = ""
        entry.is_released = False
        lines = [self.queues.setdefault(entry.epoch, OrderedDict())]
        if entry.item.key is not None:
            lines.append(self.by_key.setdefault(entry.item.key, OrderedDict()))
        for line in lines:
            line[entry.item.id] = entry
            if at_front:
                line.move_to_end(entry.item.id, last=False)
        self.num_queued += 1
        self.queued_bytes += entry.item.num_bytes

    def lease(self, entry: Entry, client: str) -> None:
        """Hand a queued item out."""
        entry.state = ItemState.LEASED
        entry.holder = client
        self.num_queued -= 1
        self.queued_bytes -= entry.item.num_bytes
        del self.queues[entry.epoch][entry.item.id]
        if entry.item.key is not None:
            of_key = self.by_key[entry.item.key]
            del of_key[entry.item.id]
            if not of_key:
                del self.by_key[entry.item.key]

    def held(self, client: str, ids: Iterable[int]) -> list[Entry]:
        """Of these items, those that a client has. One that came to it again may be named twice."""
        entries = [self.items.get(item_id) for item_id in dict.fromkeys(ids)]
        return [entry for entry in entries if entry is not None and entry.holder == client]

    def front(self, last_epoch: int, max_items: int) -> list[Entry]:
        """The first queued items of epochs up to `last_epoch`."""
        found: list[Entry] = []
        for epoch in sorted(e for e in self.queues if e <= last_epoch):
            found += islice(self.queues[epoch].values(), max_items - len(found))
        return found

    def by_keys(self, keys: Sequence[Any]) -> list[Entry] | None:
        """One item of each key; None while one is missing."""
        ways = {key: iter(self.by_key.get(key, {}).values()) for key in keys}
        found = [next(ways[key], None) for key in keys]
        return None if None in found else found  # type: ignore[return-value]

    def finish(self, entries: list[Entry], consumer: str) -> None:
        """The consumer is done with them: they will never be delivered again."""
        traffic = self.consumers[consumer]
        for entry in entries:
            entry.state = ItemState.HELD
            traffic.count(entry.item.num_bytes, entry.item.weight)
            self._count_down(entry.epoch)

    def fail(self, entry: Entry, error: str) -> bool:
        """A consumer failed at it. True: too often, it is set aside."""
        entry.num_failures += 1
        if entry.num_failures < self.options.max_failures:
            return False
        self.num_set_aside += 1
        if len(self.set_aside) < MAX_NAMED:
            row = {"id": entry.item.id, "key": entry.item.key, "producer": entry.producer, "error": error}
            self.set_aside.append(row)
        return True

    def _count_down(self, epoch: int) -> None:
        self.unfinished[epoch] -= 1
        if not self.unfinished[epoch]:
            del self.unfinished[epoch]

    def end_epoch(self, num_events: int) -> None:
        self.ended_by.pop(self.epoch, None)
        self.put_in_epoch.pop(self.epoch, None)
        self.epoch += 1
        self.drain(num_events)

    def drain(self, num_events: int) -> None:
        """Count epochs that have ended and whose items are all done."""
        while self.num_drained < self.epoch and self.num_drained not in self.unfinished:
            self.queues.pop(self.num_drained, None)
            self.num_drained += 1
            self.drained_at.append(num_events)

    # --- what can be seen of it ---------------------------------------------------------------------------

    def epoch_of(self, consumer: str, seen_at: int) -> int:
        """The epoch that a consumer is in: not before those that were over when it came, at the event `seen_at`."""
        return max(self.consumer_epoch.get(consumer, 0), bisect_right(self.drained_at, seen_at))

    def producing_groups(self) -> set[str]:
        return {group_of(producer) for producer in self.producers}

    def is_taken_by(self, group: str) -> bool:
        return any(group_of(consumer) == group for consumer in self.consumer_epoch)

    def stats(self) -> dict[str, Any]:
        states = [entry.state for entry in self.items.values()]
        return {
            "name": self.name,
            "depth": self.num_queued,
            "queued_bytes": self.queued_bytes,
            "leased": states.count(ItemState.LEASED),
            "held": states.count(ItemState.HELD),
            "epoch": self.epoch,
            "epochs_drained": self.num_drained,
            "waiting_producers": len(self.puts),
            "waiting_consumers": len(self.takes),
            "num_redelivered": self.num_redelivered,
            "num_set_aside": self.num_set_aside,
            "set_aside": self.set_aside,
            "is_closed": self.is_closed,
            "producers": _rows(self.producers),
            "consumers": _rows(self.consumers),
        }


def _rows(side: dict[str, Flowed]) -> dict[str, dict[str, int]]:
    return {name: {"items": flowed.items, "bytes": flowed.num_bytes} for name, flowed in side.items()}


def as_key(key: Any) -> Any:
    """Keys are text, numbers, or tuples of them; a tuple travels as a list."""
    return tuple(as_key(part) for part in key) if isinstance(key, list) else key
