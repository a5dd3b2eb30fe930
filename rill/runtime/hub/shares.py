"""Redistribution between groups of different data-parallel size (DistFlow, figure 7), by key. Part of the broker.

Every producer rank puts its part under a key; once all parts are there the concatenation, in producer order, is cut
into one share per consumer rank. The key names the redistribution, so two of them in one step cannot mix: each key
has its own parts, its own sizes and its own shares, and is forgotten when every share is done. Only descriptors are
cut here; each consumer then reads its payloads from where they were produced.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from rill.runtime.hub.channel_state import QUEUED, Item, as_key
from rill.runtime.hub.service import DEFERRED, ServiceError, name_of

if TYPE_CHECKING:
    from rill.runtime.hub.broker import Broker
    from rill.runtime.hub.state import Machine


class Share:
    """One redistribution."""

    def __init__(self, num_producers: int) -> None:
        self.num_producers = num_producers
        self.parts: dict[int, list[Item]] = {}
        self.num_consumers: int | None = None
        self.balance = "count"
        self.cut: list[list[Item]] | None = None
        self.waits: dict[int, tuple[str, int, float]] = {}
        self.taken: set[int] = set()
        self.num_unfinished = 0

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.num_producers


class Shares:
    """All redistributions of all channels."""

    def __init__(self, machine: Machine, broker: Broker) -> None:
        self._machine = machine
        self._broker = broker
        self._shares: dict[tuple[str, Any], Share] = {}

    def put(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, key, rank, world size, descriptors]."""
        name, raw_key, rank, world_size, descriptors = payload
        channel = self._broker.channel_for_put(name, descriptors)
        key = as_key(raw_key)
        share = self._shares.get((name, key))
        if share is None:
            share = self._shares[(name, key)] = Share(world_size)
        if share.num_producers == 0:
            share.num_producers = world_size
        if share.num_producers != world_size or rank in share.parts or not 0 <= rank < world_size:
            for descriptor in descriptors:
                self._broker.ledger.free_ref(descriptor[4])
            raise ServiceError(
                "ConfigError",
                f"put_share({key!r}, rank={rank}, world_size={world_size}) by {name_of(client)}: this key has"
                f" world_size={share.num_producers} and parts of ranks {sorted(share.parts)} already:"
                " use a key of its own for every redistribution",
            )
        items = [channel.new_item(name_of(client), descriptor) for descriptor in descriptors]
        for item in items:
            channel.items[item.id] = item
        share.parts[rank] = items
        share.num_unfinished += len(items)
        channel.count_put(name_of(client), items, self._machine.now_s)
        self._serve(name, key, share)
        return None

    def take(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, key, rank, world size, "count" | "weight"]: answered when every part is there."""
        name, raw_key, rank, world_size, balance = payload
        self._broker.open_channel(name)
        key = as_key(raw_key)
        share = self._shares.setdefault((name, key), Share(0))
        if share.num_consumers is None:
            share.num_consumers, share.balance = world_size, balance
        if (share.num_consumers, share.balance) != (world_size, balance) or not 0 <= rank < world_size:
            raise ServiceError(
                "ConfigError",
                f"take_share({key!r}, rank={rank}, world_size={world_size}, balance={balance!r}): others take this key"
                f" with world_size={share.num_consumers}, balance={share.balance!r}",
            )
        if rank in share.taken:
            raise ServiceError("ConfigError", f"take_share({key!r}, rank={rank}): this share has been taken")
        share.waits[rank] = (client, seq, self._machine.now_s)
        self._serve(name, key, share)
        return DEFERRED

    def cancel(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, key, seq of the take]."""
        name, raw_key, take_seq = payload
        share = self._shares.get((name, as_key(raw_key)))
        if share is not None:
            for rank, wait in list(share.waits.items()):
                if wait[:2] == (client, take_seq):
                    del share.waits[rank]
                    self._machine.reply(client, take_seq, [2, [], 1])
        return DEFERRED

    # --- called by the broker -----------------------------------------------------------------------------

    def finished(self, channel_name: str, item: Item) -> None:
        key, _rank = item.share
        share = self._shares.get((channel_name, key))
        if share is not None:
            share.num_unfinished -= 1
            self._forget_if_done(channel_name, key, share)

    def give_back(self, channel_name: str, item: Item) -> None:
        """Its consumer died: the whole share of that rank can be taken again."""
        key, rank = item.share
        item.state = QUEUED
        item.holder = ""
        item.is_released = False
        self._shares[(channel_name, key)].taken.discard(rank)

    def end_client(self, client: str) -> None:
        for share in self._shares.values():
            share.waits = {rank: w for rank, w in share.waits.items() if w[0] != client}

    def close(self, channel_name: str, error: ServiceError) -> None:
        for name, key in [k for k in self._shares if k[0] == channel_name]:
            share = self._shares.pop((name, key))
            for client, seq, _ in share.waits.values():
                self._machine.fail(client, seq, error)

    def waiting(self) -> list[tuple[str, str, float]]:
        """(client, what it waits for, since)."""
        return [
            (
                client,
                f"{name}: share {key!r}, parts of {len(s.parts)}/{s.num_producers or '?'} producers are in",
                since_s,
            )
            for (name, key), s in self._shares.items()
            for client, _, since_s in s.waits.values()
        ]

    # --- cutting ------------------------------------------------------------------------------------------

    def _serve(self, name: str, key: Any, share: Share) -> None:
        if not share.is_complete or share.num_consumers is None or share.num_producers == 0:
            return
        if share.cut is None:
            everything = [item for rank in range(share.num_producers) for item in share.parts[rank]]
            cut = cut_by_weight if share.balance == "weight" else cut_by_count
            share.cut = cut(everything, share.num_consumers)
            for rank, part in enumerate(share.cut):
                for item in part:
                    item.share = (key, rank)
        for rank, (client, seq, _) in sorted(share.waits.items()):
            items = [item for item in share.cut[rank] if item.state == QUEUED]
            self._broker.grants.lease_share(name, client, items)
            share.taken.add(rank)
            self._machine.reply(client, seq, [0, [item.wire() for item in items], 1])
        share.waits.clear()
        self._forget_if_done(name, key, share)

    def _forget_if_done(self, name: str, key: Any, share: Share) -> None:
        if share.cut is not None and share.num_unfinished == 0 and len(share.taken) == share.num_consumers:
            self._shares.pop((name, key), None)


def cut_by_count(items: list[Item], num_shares: int) -> list[list[Item]]:
    """Contiguous shares whose sizes differ by at most one."""
    size, rest = divmod(len(items), num_shares)
    shares = []
    start = 0
    for rank in range(num_shares):
        end = start + size + (rank < rest)
        shares.append(items[start:end])
        start = end
    return shares


def cut_by_weight(items: list[Item], num_shares: int) -> list[list[Item]]:
    """Heaviest first to the lightest share; within a share the order stays."""
    shares: list[list[Item]] = [[] for _ in range(num_shares)]
    loads = [(0.0, rank) for rank in range(num_shares)]
    for item in sorted(items, key=lambda i: (-i.weight, i.id)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + item.weight, rank))
    place = {item.id: n for n, item in enumerate(items)}
    return [sorted(share, key=lambda i: place[i.id]) for share in shares]
