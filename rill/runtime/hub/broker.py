"""The channel broker: descriptors, leases, epochs and back-pressure of every channel. A service of the hub.

Payloads never come here. Its traffic is one descriptor per item each way, batched by the clients, whatever the size
of the payload. Every take is a lease: a Commit finishes it, together with what was put for it; the holder's death, or
GiveBack, returns it to the front.

Waits are served in the order they came; one that cannot be met yet (for keys, or an epoch) holds up nobody. The
`Ledger` frees the payloads' memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rill.errors import ChannelClosedError, ConfigError
from rill.runtime.address import STORE_GROUP, group_of, name_of
from rill.runtime.hub.channel_state import ChannelState, Entry, ItemState, PutWait, TakeWait, as_key
from rill.runtime.hub.messages import ChannelOptions, Commit, GiveBack, Grant, Ids, Take, refusal
from rill.runtime.transfer.segments import Ref, owner_of

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine

ANY_EPOCH = 1 << 62


class Broker:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.channels: dict[str, ChannelState] = {}
        self.ledger = Ledger(machine)
        self._entering: dict[tuple[str, int], int] = {}
        """(client, seq) of a commit -> channels that have not let all of it in."""

    def on_stats(self, client: str, seq: int, name: str) -> Any:
        return self._channel(name).stats()

    def on_overview(self, client: str, seq: int, payload: None) -> Any:
        """All channels and waits, for a stuck-run report."""
        return {name: channel.stats() for name, channel in self.channels.items()}, self.waits()

    def waits(self) -> list[tuple[str, str, str, float]]:
        """Who waits on which channel: (client, channel, "put" or "take", since)."""
        found = []
        for name, channel in self.channels.items():
            found += [(wait.client, name, "take", wait.since_s) for wait in channel.takes]
            found += [(wait.client, name, "put", wait.since_s) for wait in channel.puts]
        return found

    # --- channels -----------------------------------------------------------------------------------------

    def on_create(self, client: str, seq: int, options: ChannelOptions) -> bool:
        if options.name in self.channels:  # also closed: what is left of it still has its items' numbers
            raise ConfigError(f"a channel named {options.name!r} exists or existed: choose another name")
        self.channels[options.name] = ChannelState(options, name_of(client))
        return True

    def _channel(self, name: str) -> ChannelState:
        if name not in self.channels:
            raise ChannelClosedError(f"channel {name!r} does not exist in this cluster")
        return self.channels[name]

    def _open_channel(self, name: str) -> ChannelState:
        channel = self._channel(name)
        if channel.is_closed:
            raise ChannelClosedError(f"channel {name!r} is closed")
        return channel

    def on_close(self, client: str, seq: int, name: str) -> bool:
        """Puts and takes fail from now on; leased items may still be finished."""
        channel = self._open_channel(name)
        channel.is_closed = True
        error = ChannelClosedError(f"channel {name!r} was closed by {name_of(client)}")
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
            self._drop(channel, entry)
        self._machine.has_moved_items = True
        return True

    # --- putting and finishing ----------------------------------------------------------------------------

    def on_commit(self, client: str, seq: int, commit: Commit) -> Any:
        """All of it, or, where a channel is closed, nothing."""
        try:
            targets = [self._open_channel(puts.channel) for puts in commit.puts]
        except ChannelClosedError as error:
            for puts in commit.puts:
                for item in puts.items:
                    self.ledger.free(item.ref)
            if commit.wants_reply:
                raise
            channels = [puts.channel for puts in commit.puts]
            self._machine.push(client, "commit_failed", [channels, *refusal(error)])
            return None
        for done in commit.done:
            self._finish(self._channel(done.channel), client, done.ids)
        producer = name_of(client)
        for channel, puts in zip(targets, commit.puts, strict=True):
            entries = [channel.new_entry(producer, item) for item in puts.items]
            if channel.options.is_bounded and commit.wants_reply:
                channel.puts.append(PutWait(client, seq, deque(entries), self._machine.now_s))
                self._entering[client, seq] = self._entering.get((client, seq), 0) + 1
            else:
                for entry in entries:
                    channel.admit(entry)
        is_waiting = (client, seq) in self._entering
        for channel in (*targets, *(self._channel(done.channel) for done in commit.done)):
            self._serve(channel)
        return None if is_waiting or not commit.wants_reply else 0

    def _finish(self, channel: ChannelState, client: str, ids: list[int]) -> None:
        entries = channel.held(client, ids)
        leased = [entry for entry in entries if entry.state is ItemState.LEASED]
        channel.finish(leased, name_of(client))
        for entry in entries:
            if entry.item.ref is None or entry.is_released:
                self._forget(channel, entry)

    def _forget(self, channel: ChannelState, entry: Entry) -> None:
        del channel.items[entry.item.id]
        self.ledger.free(entry.item.ref)

    # --- taking -------------------------------------------------------------------------------------------

    def on_take(self, client: str, seq: int, take: Take) -> None:
        channel = self._open_channel(take.channel)
        channel.passing.discard(client)
        name = name_of(client)
        seen_at = self._machine.membership.seen_at(name)
        channel.consumer_epoch[name] = channel.epoch_of(name, seen_at) if take.epoch is None else take.epoch
        take.keys = take.keys and [as_key(key) for key in take.keys]
        channel.takes.append(TakeWait(client, seq, take, self._machine.now_s))
        self._serve(channel)

    def on_cancel(self, client: str, seq: int, cancelled: int) -> None:
        """The wait of that number is taken back: a take is answered with nothing, a commit with how much was left out,
        unless it was answered already."""
        num_left_out = 0
        for channel in self.channels.values():
            for take in [t for t in channel.takes if (t.client, t.seq) == (client, cancelled)]:
                channel.takes.remove(take)
                self._machine.reply(client, cancelled, Grant([]))
            for put in [p for p in channel.puts if (p.client, p.seq) == (client, cancelled)]:
                channel.puts.remove(put)
                for entry in put.entries:
                    self._drop(channel, entry)
                num_left_out += len(put.entries)
                self._entered(put, num_left_out)
                self._serve(channel)

    def on_release(self, client: str, seq: int, released: Ids) -> None:
        channel = self._channel(released.channel)
        for entry in channel.held(client, released.ids):
            if entry.state is ItemState.HELD:
                self._forget(channel, entry)
            else:
                entry.is_released = True

    def on_give_back(self, client: str, seq: int, given: GiveBack) -> None:
        channel = self._channel(given.channel)
        held = channel.held(client, given.ids)
        entries = [entry for entry in held if entry.state is ItemState.LEASED]
        if given.error:
            channel.num_redelivered += len(entries)
            for entry in [entry for entry in entries if channel.fail(entry, given.error)]:
                entries.remove(entry)
                self._drop(channel, entry)
        self._return(channel, entries)
        self._serve(channel)

    def _return(self, channel: ChannelState, entries: list[Entry]) -> None:
        for entry in sorted(entries, key=lambda entry: entry.item.id, reverse=True):
            if channel.is_closed:
                self._drop(channel, entry)
            else:
                channel.enqueue(entry, at_front=True)

    def _drop(self, channel: ChannelState, entry: Entry) -> None:
        channel.drop(entry)
        self.ledger.free(entry.item.ref)

    # --- serving who waits --------------------------------------------------------------------------------

    def _entered(self, wait: PutWait, num_left_out: int = 0) -> None:
        key = (wait.client, wait.seq)
        self._entering[key] -= 1
        if self._entering[key] == 0:
            del self._entering[key]
            self._machine.reply(wait.client, wait.seq, num_left_out)

    def _serve(self, channel: ChannelState) -> None:
        """Let waiting puts in and grant waiting takes until nothing moves."""
        if channel.is_closed:
            return
        while True:
            self._serve_puts(channel)
            channel.drain(self._machine.num_events)
            num_before = len(channel.takes)
            channel.takes = [wait for wait in channel.takes if not self._grant(channel, wait)]
            if len(channel.takes) == num_before:
                break
        self._machine.has_moved_items = True

    def _serve_puts(self, channel: ChannelState) -> None:
        while channel.puts:
            wait = channel.puts[0]
            while wait.entries and channel.has_room_for(wait.entries[0]):
                channel.admit(wait.entries.popleft())
            if wait.entries:
                return
            channel.puts.popleft()
            self._entered(wait)

    def _grant(self, channel: ChannelState, wait: TakeWait) -> bool:
        """Items, or, where a loop's epoch is over, its end."""
        if wait.take.keys is not None:
            found = channel.by_keys(wait.take.keys)
            if found is None:
                return False
        else:
            name = name_of(wait.client)
            last_epoch = channel.consumer_epoch[name] if wait.take.in_loop else ANY_EPOCH
            found = []
            if channel.num_queued:
                # What is beyond need is shared out between all who may come for it.
                fair = channel.num_queued // len(channel.consumer_epoch)
                found = channel.front(last_epoch, max(1, min(wait.take.max_items, fair)))
            if not found:
                if last_epoch >= channel.num_drained:
                    return False
                channel.consumer_epoch[name] += 1
                channel.passing.add(wait.client)
                self._machine.reply(wait.client, wait.seq, Grant([], is_end=True))
                return True
        for entry in found:
            channel.lease(entry, wait.client)
        self._machine.reply(wait.client, wait.seq, Grant([entry.item for entry in found]))
        return True

    # --- epochs -------------------------------------------------------------------------------------------

    def on_end(self, client: str, seq: int, name: str) -> Any:
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
        self._serve(channel)
        return channel.epoch

    def _end_epochs(self, channel: ChannelState) -> None:
        ranks = self._machine.membership.ranks
        while ended := channel.ended_by.get(channel.epoch):
            names = ended | channel.put_in_epoch.get(channel.epoch, set())
            groups = {group_of(name) for name in names if name != channel.creator}
            if not all(f"{group}[{rank}]" in ended for group in groups for rank in ranks(group)):
                return
            channel.end_epoch(self._machine.num_events)

    def members_changed(self) -> None:
        """A group has other ranks now: an epoch may have ended with those that left."""
        for channel in self.channels.values():
            if channel.ended_by and not channel.is_closed:
                self._end_epochs(channel)
                self._serve(channel)

    def on_pass_end(self, client: str, seq: int, name: str) -> None:
        self._channel(name).passing.discard(client)

    def on_unend(self, client: str, seq: int, name: str) -> None:
        """The epoch's end came too late for the loop that waited for it: the consumer meets it again."""
        channel = self._channel(name)
        channel.passing.discard(client)
        channel.consumer_epoch[name_of(client)] -= 1

    # --- deaths -------------------------------------------------------------------------------------------

    def end_client(self, client: str) -> None:
        """What it leased goes back; what it put stays, in memory that outlives it."""
        for channel in self.channels.values():
            held = channel.held(client, channel.items)
            leased = [entry for entry in held if entry.state is ItemState.LEASED]
            for entry in held:
                if entry.state is ItemState.HELD:  # done, but looked at until now
                    self._forget(channel, entry)
            channel.num_redelivered += len(leased)
            self._return(channel, leased)
            channel.takes = [w for w in channel.takes if w.client != client]
            if client in channel.passing:
                channel.passing.discard(client)
                channel.consumer_epoch[name_of(client)] -= 1
        self.ledger.end_owner(client, self._refs())
        for channel in self.channels.values():
            self._serve(channel)

    def _refs(self) -> Iterator[Ref | None]:
        for channel in self.channels.values():
            waiting = (entry for wait in channel.puts for entry in wait.entries)
            for entry in (*channel.items.values(), *waiting):
                yield entry.item.ref


class Ledger:
    """Whose memory is free: tells owners when a payload is no longer needed, and ends the files of dead owners."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: dict[str, list[tuple[str, int]]] = {}
        self._orphans: Counter[str] = Counter()
        """Store segments of dead processes -> how many items still lie in them."""

    def free(self, ref: Ref | None) -> None:
        """Tell the owner of the memory, or count down to the file's end when the owner is dead."""
        if ref is None:
            return
        if ref.owner in self._machine.membership.members:
            self._free.setdefault(ref.owner, []).append(ref.slot)
        elif ref.segment in self._orphans:
            self._orphans[ref.segment] -= 1
            if self._orphans[ref.segment] == 0:
                del self._orphans[ref.segment]
                self._unlink(ref.owner)

    def tell(self) -> None:
        """At the end of an event: one message per owner of freed memory."""
        if self._free:
            free, self._free = self._free, {}
            for owner, slots in free.items():
                self._machine.push(owner, "store_free", slots)

    def end_owner(self, client: str, refs: Iterable[Ref | None]) -> None:
        """Memory that outlives its process: count what still lies there, delete the rest."""
        self._free.pop(client, None)
        self._orphans.update(ref.segment for ref in refs if ref is not None and ref.owner == client)
        self._unlink(client)

    def _unlink(self, owner: str) -> None:
        """For the hub's own node and every node's store server."""
        order = (owner, sorted(segment for segment in self._orphans if owner_of(segment) == owner))
        self._machine.unlinks.append(order)
        for member in self._machine.membership.members:
            if member.startswith(STORE_GROUP):
                self._machine.push(member, "store_unlink", order)
