"""Who gets what of a channel, now: lets waiting puts in and grants waiting takes. Part of the broker.

Waits are served in the order they came. A wait that cannot be met yet holds up those behind it (so that a consumer
of large batches is not starved by consumers of single items), except waits for keys, which concern nobody else.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from rill.runtime.hub.channel_state import ChannelState, Entry, PutWait, TakeWait
from rill.runtime.hub.messages import EPOCH_END, Grant, GrantKind
from rill.runtime.hub.service import ServiceError, name_of

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

ANY_EPOCH = 1 << 62


class _Result(IntEnum):
    GRANTED = 0
    HUNGRY = 1
    EMPTY = 2


class Grants:
    """Leases, and the rules by which they are given."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.leases: dict[str, dict[str, set[int]]] = {}
        """client -> channel -> ids of items it leases or whose memory it looks at."""
        self._entering: dict[tuple[str, int], int] = {}
        """(client, seq) of a commit -> channels that have not let all of it in."""

    def held(self, client: str, channel: str) -> set[int]:
        """The ids that a client holds of a channel, to be changed in place."""
        return self.leases.setdefault(client, {}).setdefault(channel, set())

    def enter(self, channel: ChannelState, wait: PutWait) -> None:
        """A part of a commit that is answered when the last of its parts is in."""
        key = (wait.client, wait.seq)
        self._entering[key] = self._entering.get(key, 0) + 1
        channel.puts.append(wait)

    def entered(self, wait: PutWait, num_left_out: int = 0) -> None:
        key = (wait.client, wait.seq)
        self._entering[key] -= 1
        if self._entering[key] == 0:
            del self._entering[key]
            self._machine.reply(wait.client, wait.seq, num_left_out)

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
        self._machine.changed_channels.add(channel.name)

    def _serve_puts(self, channel: ChannelState) -> None:
        while channel.puts:
            wait = channel.puts[0]
            while wait.entries and channel.has_room_for(wait.entries[0]):
                channel.admit(wait.entries.popleft(), self._machine.now_s)
            if wait.entries:
                return
            channel.puts.popleft()
            self.entered(wait)

    def _serve_takes(self, channel: ChannelState) -> bool:
        """Grant what can be granted; true when something was."""
        is_changed = False
        is_hungry = False
        for wait in list(channel.takes):
            if wait.keys is not None:
                found = channel.by_keys(wait.keys)
                if found is None:
                    continue
                self._grant(channel, wait, found)
            elif is_hungry or (channel.num_queued == 0 and not wait.in_loop):
                continue
            else:
                result = self._grant_front(channel, wait)
                is_hungry = result is _Result.HUNGRY
                if result is not _Result.GRANTED:
                    continue
            is_changed = True
        return is_changed

    def _grant_front(self, channel: ChannelState, wait: TakeWait) -> _Result:
        name = name_of(wait.client)
        last_epoch = channel.consumer_epoch[name] if wait.in_loop else ANY_EPOCH
        found: list[Entry] = []
        total = 0.0
        if channel.num_queued:
            # What is beyond need is shared out between all who may come for it.
            fair = channel.num_queued // max(1, len(channel.consumer_epoch))
            max_items = max(wait.min_items, min(wait.max_items, fair))
            found, total = channel.front(last_epoch, max_items, wait.weight)
        is_whole = total >= wait.weight if wait.weight is not None else len(found) >= wait.min_items
        is_last = last_epoch < channel.epoch and not self._may_grow(channel, last_epoch)
        if found and (is_whole or is_last):
            self._grant(channel, wait, found)
            return _Result.GRANTED
        if not found and last_epoch < channel.num_drained:
            channel.consumer_epoch[name] += 1
            channel.passing.add(wait.client)
            channel.takes.remove(wait)
            self._machine.reply(wait.client, wait.seq, EPOCH_END)
            return _Result.GRANTED
        return _Result.HUNGRY if found else _Result.EMPTY

    def _may_grow(self, channel: ChannelState, last_epoch: int) -> bool:
        """Whether more items of an ended epoch can still come: puts that wait for room."""
        return any(entry.epoch <= last_epoch for wait in channel.puts for entry in wait.entries)

    def _grant(self, channel: ChannelState, wait: TakeWait, entries: list[Entry]) -> None:
        channel.takes.remove(wait)
        held = self.held(wait.client, channel.name)
        for entry in entries:
            channel.lease(entry, wait.client)
            held.add(entry.id)
        num_wanted = len(entries) if wait.keys is not None or wait.weight is not None else wait.min_items
        grant = Grant(GrantKind.ITEMS, [entry.wire() for entry in entries], num_wanted)
        self._machine.reply(wait.client, wait.seq, grant)

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
