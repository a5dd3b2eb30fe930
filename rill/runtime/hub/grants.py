"""Who gets what of a channel, now: lets waiting puts in and grants waiting takes. Part of the broker.

Waits are served in the order they came. A wait that cannot be met yet holds up those behind it (so that a consumer
of large batches is not starved by consumers of single items), except waits for keys, which concern nobody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rill.runtime.hub.channel_state import LEASED, QUEUED, ChannelState, Item, TakeWait
from rill.runtime.hub.service import ServiceError, name_of

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

ITEMS, EPOCH_END, NOTHING = 0, 1, 2
"""What a take is answered with: [one of these, items, granularity]. NOTHING: cancelled, or a choice that is gone."""
ANY_EPOCH = 1 << 62
_GRANTED, _HUNGRY, _EMPTY = 0, 1, 2


class Grants:
    """Leases, and the rules by which they are given."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.leases: dict[str, dict[str, set[int]]] = {}
        """client -> channel -> ids of items it leases or whose memory it looks at."""

    def held(self, client: str, channel: str) -> set[int]:
        """The ids that a client holds of a channel, to be changed in place."""
        return self.leases.setdefault(client, {}).setdefault(channel, set())

    def serve(self, channel: ChannelState) -> None:
        """Let waiting puts in and grant waiting takes until nothing moves."""
        if channel.is_closed:
            return
        while True:
            self._serve_puts(channel)
            channel.drain(self._machine.num_events)
            if not channel.takes or not self._serve_takes(channel):
                break
        if channel.takes and channel.puts:
            self._refuse_impossible(channel)
        if channel.watches:
            for client, seq in channel.watches:
                self._machine.reply(client, seq, channel.version)
            channel.watches = []
        self._machine.locks.channel_changed(channel.name)

    def _serve_puts(self, channel: ChannelState) -> None:
        while channel.puts:
            wait = channel.puts[0]
            while wait.items and channel.has_room_for(wait.items[0]):
                channel.admit([wait.items.pop(0)], self._machine.now_s)
            if wait.items:
                return
            channel.puts.popleft()
            self._machine.reply(wait.client, wait.seq, 0)

    def _serve_takes(self, channel: ChannelState) -> bool:
        """Grant what can be granted; true when something was."""
        is_changed = False
        is_hungry = False
        for wait in list(channel.takes):
            if wait.ids is not None:
                self._grant_choice(channel, wait)
            elif wait.keys is not None:
                found = self._find_keys(channel, wait.keys)
                if found is None:
                    continue
                self._grant(channel, wait, found)
            elif is_hungry:
                continue
            else:
                if channel.num_queued == 0 and not wait.in_loop:
                    continue
                outcome = self._grant_front(channel, wait)
                is_hungry = outcome == _HUNGRY
                if outcome != _GRANTED:
                    continue
            is_changed = True
        return is_changed

    def _grant_front(self, channel: ChannelState, wait: TakeWait) -> int:
        name = name_of(wait.client)
        last_epoch = channel.consumer_epoch[name] if wait.in_loop else ANY_EPOCH
        found: list[Item] = []
        total = 0.0
        if channel.num_queued:
            max_items = wait.max_items
            if (
                wait.min_items < max_items
            ):  # what is beyond need is shared out between all who may come for it
                fair = channel.num_queued // max(1, len(channel.consumer_epoch))
                max_items = max(wait.min_items, min(max_items, max(fair, wait.at_once)))
            found, total = channel.front(last_epoch, max_items, wait.weight)
        is_whole = total >= wait.weight if wait.weight is not None else len(found) >= wait.min_items
        if found and (is_whole or (last_epoch < channel.epoch and not self._may_grow(channel, last_epoch))):
            self._grant(channel, wait, found)
            return _GRANTED
        if not found and last_epoch < channel.num_drained:
            channel.consumer_epoch[name] += 1
            channel.takes.remove(wait)
            self._machine.reply(wait.client, wait.seq, [EPOCH_END, [], 1])
            return _GRANTED
        return _HUNGRY if found else _EMPTY

    def _may_grow(self, channel: ChannelState, last_epoch: int) -> bool:
        """Whether more items of an ended epoch can still come: puts that wait for room."""
        return any(item.epoch <= last_epoch for wait in channel.puts for item in wait.items)

    def _find_keys(self, channel: ChannelState, keys: list[Any]) -> list[Item] | None:
        needed: dict[Any, int] = {}
        found = []
        for key in keys:
            ids = channel.by_key.get(key, ())
            n = needed.get(key, 0)
            if n >= len(ids):
                return None
            found.append(channel.items[ids[n]])
            needed[key] = n + 1
        return found

    def _grant_choice(self, channel: ChannelState, wait: TakeWait) -> None:
        chosen = [channel.items.get(item_id) for item_id in wait.ids or ()]
        if all(item is not None and item.state == QUEUED for item in chosen):
            self._grant(channel, wait, [item for item in chosen if item is not None])
        else:
            channel.takes.remove(wait)
            self._machine.reply(wait.client, wait.seq, [NOTHING, [], 1])

    def _grant(self, channel: ChannelState, wait: TakeWait, items: list[Item]) -> None:
        channel.takes.remove(wait)
        held = self.held(wait.client, channel.name)
        client = wait.client
        for item in items:
            channel.lease(item, client)
            held.add(item.id)
        self._machine.reply(client, wait.seq, [ITEMS, [item.wire() for item in items], channel.granularity])

    def lease_share(self, name: str, client: str, items: list[Item]) -> None:
        """Lease items that are not in the queue."""
        held = self.held(client, name)
        for item in items:
            item.state = LEASED
            item.holder = client
            held.add(item.id)

    def _refuse_impossible(self, channel: ChannelState) -> None:
        """The queue is full and the first take wants more than fits: neither side could ever move."""
        for wait in channel.takes:
            if wait.keys is not None:
                continue
            last_epoch = channel.consumer_epoch[name_of(wait.client)] if wait.in_loop else ANY_EPOCH
            found, _ = channel.front(last_epoch, wait.max_items, wait.weight)
            if len(found) < channel.num_queued:
                return  # it waits for its epoch, not for room
            wanted = f"weight={wait.weight}" if wait.weight is not None else f"count={wait.min_items}"
            channel.takes.remove(wait)
            error = ServiceError(
                "ConfigError",
                f"take_batch({wanted}) on {channel.name!r} can never be met: the channel is full with"
                f" {channel.num_queued} items ({channel.queued_bytes} bytes): raise its capacity or take less",
            )
            self._machine.fail(wait.client, wait.seq, error)
            return
