"""What can be seen of the channels without changing them: for statistics, the planner, locks and stuck-run reports."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from rill.runtime.hub.channel_state import ChannelState, ItemState, Traffic
from rill.runtime.hub.service import group_of

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine


class Role(NamedTuple):
    """What a group is to a channel."""

    is_producer: bool
    is_consumer: bool
    has_other_producers: bool
    has_data: bool
    """It holds an item, or an epoch's end that one of those who ask has not seen."""


class BrokerView:
    """Reads the broker's channels."""

    def __init__(self, machine: Machine, channels: dict[str, ChannelState]) -> None:
        self._machine = machine
        self._channels = channels

    def stats(self, channel: ChannelState) -> dict[str, Any]:
        states = [entry.state for entry in channel.items.values()]
        return {
            "name": channel.name,
            "depth": channel.num_queued,
            "queued_bytes": channel.queued_bytes,
            "leased": states.count(ItemState.LEASED),
            "held": states.count(ItemState.HELD),
            "epoch": channel.epoch,
            "epochs_drained": channel.num_drained,
            "waiting_producers": len(channel.puts),
            "waiting_consumers": len(channel.takes),
            "num_redelivered": channel.num_redelivered,
            "num_set_aside": channel.num_set_aside,
            "set_aside": channel.set_aside,
            "is_closed": channel.is_closed,
            "producers": _rows(channel.producers),
            "consumers": _rows(channel.consumers),
        }

    def waits(self) -> list[Any]:
        """Who waits on which channel: [client, channel, "put" | "take", since]."""
        waits = []
        for name, channel in self._channels.items():
            waits += [[w.client, name, "take", w.since_s] for w in channel.takes]
            waits += [[w.client, name, "put", w.since_s] for w in channel.puts]
        return waits

    def role_of(self, group: str, name: str, asking: Collection[str] = ()) -> Role:
        """What a group is to a channel, as far as traffic has shown. `asking`: the names of its ranks that would work
        now; those that have not met the end of an epoch have something to meet, whatever the others have."""
        channel = self._channels.get(name)
        if channel is None:
            return Role(False, False, False, False)
        producers = {group_of(producer) for producer in channel.producers}
        consumers = [consumer for consumer in channel.consumer_epoch if group_of(consumer) == group]
        seen_at = self._machine.membership.seen_at
        begins = {rank: channel.epochs_drained_before(seen_at(rank)) for rank in asking}
        is_behind = any(channel.consumer_epoch.get(rank, begins[rank]) < channel.epoch for rank in asking)
        has_data = channel.num_queued > 0 or channel.is_closed or is_behind
        return Role(group in producers, bool(consumers), bool(producers - {group}), has_data)

    def producers_of(self, name: str) -> set[str]:
        """Groups that have put into a channel."""
        channel = self._channels.get(name)
        return set() if channel is None else {group_of(producer) for producer in channel.producers}

    def taken_by(self, group: str) -> set[str]:
        """Channels from which a group has asked for something."""
        return {
            name
            for name, channel in self._channels.items()
            if any(group_of(consumer) == group for consumer in channel.consumer_epoch)
        }

    def blocked_on(self) -> dict[str, set[str]]:
        """client -> channels on which it waits."""
        blocked: dict[str, set[str]] = {}
        for name, channel in self._channels.items():
            for client in [*(w.client for w in channel.takes), *(w.client for w in channel.puts)]:
                blocked.setdefault(client, set()).add(name)
        return blocked


def _rows(side: dict[str, Traffic]) -> dict[str, dict[str, float]]:
    return {n: {"items": t.num_items, "bytes": t.num_bytes, "last_s": t.last_s} for n, t in side.items()}
