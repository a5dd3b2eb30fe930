"""The channel broker: descriptors, leases, epochs and back-pressure of every channel. A service of the hub.

Payloads never come here. Its traffic is one descriptor per item each way, batched by the clients, whatever the size
of the payload. Every take is a lease: a Commit finishes it, together with what was put for it; the holder's death, or
GiveBack, returns it to the front.

What the parts own: `grants` leases and their rules, `ledger` the payloads' memory, `view` what can be seen from
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rill.runtime.hub.channel_state import ChannelState, Entry, ItemState, PutWait, TakeWait
from rill.runtime.hub.grants import Grants
from rill.runtime.hub.ledger import Ledger
from rill.runtime.hub.messages import (
    NOTHING,
    Cancel,
    ChannelOptions,
    Commit,
    Configure,
    GiveBack,
    Settle,
    Take,
)
from rill.runtime.hub.service import DEFERRED, Handler, ServiceError, group_of, name_of
from rill.runtime.hub.view import BrokerView
from rill.runtime.transfer.segments import Ref

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine


class Broker:
    """All channels."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.channels: dict[str, ChannelState] = {}
        self.ledger = Ledger(machine)
        self.grants = Grants(machine)
        self.view = BrokerView(machine, self.channels)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "create": Handler(ChannelOptions, self._create),
            "configure": Handler(Configure, self._configure),
            "commit": Handler(Commit, self._commit),
            "take": Handler(Take, self._take),
            "cancel": Handler(Cancel, self._cancel),
            "settle": Handler(Settle, self._settle),
            "give_back": Handler(GiveBack, self._give_back),
            "end": Handler(str, self._end),
            "pass_end": Handler(str, self._pass_end),
            "unend": Handler(str, self._unend),
            "close": Handler(str, self._close),
        }

    def queries(self) -> Mapping[str, Callable[[Any], Any]]:
        return self.view.queries()

    # --- channels -----------------------------------------------------------------------------------------

    def _create(self, client: str, seq: int, options: ChannelOptions) -> Any:
        if (
            options.name in self.channels
        ):  # also a closed one: what is left of it still has its items' numbers
            raise ServiceError(
                "ConfigError", f"a channel named {options.name!r} exists or existed: choose another name"
            )
        self.channels[options.name] = ChannelState(options, name_of(client))
        return None

    def _configure(self, client: str, seq: int, change: Configure) -> Any:
        self._open_channel(change.channel).granularity = change.granularity
        return None

    def _channel(self, name: str) -> ChannelState:
        try:
            return self.channels[name]
        except KeyError:
            raise ServiceError(
                "ChannelClosedError", f"channel {name!r} does not exist in this cluster"
            ) from None

    def _open_channel(self, name: str) -> ChannelState:
        channel = self._channel(name)
        if channel.is_closed:
            raise ServiceError("ChannelClosedError", f"channel {name!r} is closed")
        return channel

    def _close(self, client: str, seq: int, name: str) -> Any:
        """Puts and takes fail from now on; leased items may still be finished."""
        channel = self._open_channel(name)
        channel.is_closed = True
        error = ServiceError("ChannelClosedError", f"channel {name!r} was closed by {name_of(client)}")
        waits = [(take.client, take.seq) for take in channel.takes]
        waits += dict.fromkeys((put.client, put.seq) for put in channel.puts)
        for waiter, waiter_seq in waits:
            self._machine.fail(waiter, waiter_seq, error)
        dropped = [entry for wait in channel.puts for entry in wait.entries]
        dropped += [entry for entry in channel.items.values() if entry.state is ItemState.QUEUED]
        channel.takes = []
        channel.puts.clear()
        channel.queues = {}
        channel.by_key = {}
        channel.num_queued = channel.queued_bytes = 0
        for entry in dropped:
            channel.items.pop(entry.id, None)
            self.ledger.free(entry.descriptor.ref)
        self._machine.changed_channels.add(name)
        return None

    # --- putting and finishing ----------------------------------------------------------------------------

    def _commit(self, client: str, seq: int, commit: Commit) -> Any:
        """All of it, or, where a channel is closed, nothing."""
        try:
            targets = [self._open_channel(puts.channel) for puts in commit.puts]
        except ServiceError as error:
            for puts in commit.puts:
                for descriptor in puts.items:
                    self.ledger.free(descriptor.ref)
            if commit.wants_reply:
                raise
            channels = [puts.channel for puts in commit.puts]
            self._machine.push(client, "commit_failed", [channels, error.kind, error.message])
            return DEFERRED
        for done in commit.done:
            self._finish(self._channel(done.channel), client, done.ids)
        is_waiting = False
        producer = name_of(client)
        for channel, puts in zip(targets, commit.puts, strict=True):
            entries = [channel.new_entry(producer, descriptor) for descriptor in puts.items]
            if channel.is_bounded and commit.wants_reply:
                self.grants.enter(channel, PutWait(client, seq, entries, self._machine.now_s))
                is_waiting = True
            else:
                for entry in entries:
                    channel.admit(entry, self._machine.now_s)
        for channel in targets:
            self.grants.serve(channel)
        for done in commit.done:
            self.grants.serve(self._channel(done.channel))
        return DEFERRED if is_waiting or not commit.wants_reply else 0

    def _finish(self, channel: ChannelState, client: str, ids: list[int]) -> None:
        held = self.grants.held(client, channel.name)
        for item_id in ids:
            if item_id not in held:
                continue
            entry = channel.items[item_id]
            if entry.state is ItemState.LEASED:
                channel.finish(entry, self._machine.now_s)
            if entry.descriptor.ref is None or entry.is_released:
                self._forget(channel, held, entry)

    def _forget(self, channel: ChannelState, held: set[int], entry: Entry) -> None:
        held.discard(entry.id)
        self.ledger.free(channel.items.pop(entry.id).descriptor.ref)

    # --- taking -------------------------------------------------------------------------------------------

    def _take(self, client: str, seq: int, take: Take) -> Any:
        channel = self._open_channel(take.channel)
        channel.passing.discard(client)
        name = name_of(client)
        if name not in channel.consumer_epoch:
            seen_at = self._machine.membership.seen_at(name)
            channel.consumer_epoch[name] = channel.epochs_drained_before(seen_at)
        channel.takes.append(TakeWait(client, seq, take, channel.granularity, self._machine.now_s))
        self.grants.serve(channel)
        return DEFERRED

    def _cancel(self, client: str, seq: int, cancel: Cancel) -> Any:
        """A take is answered with NOTHING, a commit with what was left out, unless it was answered already."""
        channel = self._channel(cancel.channel)
        for take in [t for t in channel.takes if (t.client, t.seq) == (client, cancel.seq)]:
            channel.takes.remove(take)
            self._machine.reply(client, take.seq, NOTHING)
        for put in [p for p in channel.puts if (p.client, p.seq) == (client, cancel.seq)]:
            channel.puts.remove(put)
            for entry in put.entries:
                channel.drop(entry)
                self.ledger.free(entry.descriptor.ref)
            self.grants.entered(put, len(put.entries))
        self.grants.serve(channel)
        return DEFERRED

    def _settle(self, client: str, seq: int, settle: Settle) -> Any:
        channel = self._channel(settle.channel)
        held = self.grants.held(client, channel.name)
        for item_id in settle.released:
            if item_id in held:
                entry = channel.items[item_id]
                if entry.state is ItemState.HELD:
                    self._forget(channel, held, entry)
                else:
                    entry.is_released = True
        if settle.returned:
            self._return(channel, self._leased(channel, held, settle.returned))
            self.grants.serve(channel)
        return DEFERRED

    def _give_back(self, client: str, seq: int, failed: GiveBack) -> Any:
        channel = self._channel(failed.channel)
        held = self.grants.held(client, channel.name)
        entries = self._leased(channel, held, failed.ids)
        channel.num_redelivered += len(entries)
        hopeless = [entry for entry in entries if channel.fail(entry, failed.error)]
        self._return(channel, [entry for entry in entries if entry not in hopeless])
        for entry in hopeless:
            channel.drop(entry)
            self.ledger.free(channel.items.pop(entry.id).descriptor.ref)
        self.grants.serve(channel)
        return DEFERRED

    def _leased(self, channel: ChannelState, held: set[int], ids: list[int]) -> list[Entry]:
        """Of `ids`, those that the client leases; it holds them no more."""
        entries = [channel.items[i] for i in ids if i in held and channel.items[i].state is ItemState.LEASED]
        held.difference_update(entry.id for entry in entries)
        return entries

    def _return(self, channel: ChannelState, entries: list[Entry]) -> None:
        if not channel.is_closed:
            channel.requeue(entries)
            return
        for entry in entries:
            channel.drop(entry)
            self.ledger.free(channel.items.pop(entry.id).descriptor.ref)

    # --- epochs -------------------------------------------------------------------------------------------

    def _end(self, client: str, seq: int, name: str) -> Any:
        """The rule: once by the channel's creator, or by every rank of every group that has put into the epoch or ended
        it."""
        channel = self._open_channel(name)
        producer = name_of(client)
        if producer == channel.creator:
            channel.end_epoch(self._machine.num_events)
        else:
            epoch = max(channel.producer_epoch.get(producer, 0), channel.epoch)
            channel.producer_epoch[producer] = epoch + 1
            channel.ended_by.setdefault(epoch, set()).add(producer)
            self._end_epochs(channel)
        self.grants.serve(channel)
        return channel.epoch

    def _end_epochs(self, channel: ChannelState) -> None:
        while self._have_all_ended(channel):
            channel.end_epoch(self._machine.num_events)

    def _have_all_ended(self, channel: ChannelState) -> bool:
        ended = channel.ended_by.get(channel.epoch, set())
        if not ended:
            return False
        names = ended | channel.put_in_epoch.get(channel.epoch, set())
        groups = {group_of(name) for name in names if name != channel.creator}
        return all(self._has_ended(group, ended) for group in groups)

    def _has_ended(self, group: str, ended: set[str]) -> bool:
        return all(f"{group}[{rank}]" in ended for rank in self._machine.membership.ranks(group))

    def members_changed(self) -> None:
        """A group has other ranks now: an epoch may have ended with those that left."""
        for channel in self.channels.values():
            if channel.ended_by and not channel.is_closed:
                self._end_epochs(channel)
                self.grants.serve(channel)

    def _pass_end(self, client: str, seq: int, name: str) -> Any:
        """The call whose loop met the epoch's end has ended well."""
        self._channel(name).passing.discard(client)
        return DEFERRED

    def _unend(self, client: str, seq: int, name: str) -> Any:
        """The epoch's end came too late for the loop that waited for it: the consumer meets it again."""
        channel = self._channel(name)
        channel.passing.discard(client)
        channel.consumer_epoch[name_of(client)] -= 1
        return DEFERRED

    # --- deaths -------------------------------------------------------------------------------------------

    def end_client(self, client: str) -> None:
        """What it leased goes back; what it put stays, in memory that outlives it."""
        for name, ids in self.grants.leases.pop(client, {}).items():
            channel = self.channels[name]
            leased = self._leased(channel, ids, sorted(ids))
            for item_id in sorted(ids):  # done, but looked at until now
                self.ledger.free(channel.items.pop(item_id).descriptor.ref)
            channel.num_redelivered += len(leased)
            self._return(channel, leased)
        for channel in self.channels.values():
            channel.takes = [w for w in channel.takes if w.client != client]
            if client in channel.passing:
                channel.passing.discard(client)
                channel.consumer_epoch[name_of(client)] -= 1
        self.ledger.end_owner(client, self._refs())
        for channel in self.channels.values():
            self.grants.serve(channel)

    def _refs(self) -> Iterator[Ref | None]:
        for channel in self.channels.values():
            for entry in channel.items.values():
                yield entry.descriptor.ref
            for wait in channel.puts:
                for entry in wait.entries:
                    yield entry.descriptor.ref
