"""The channel broker: descriptors, leases, epochs and back-pressure of every channel. A service of the hub.

Payloads never come here. Its traffic is one descriptor per item each way, batched by the clients, whatever the size
of the payload. Every take is a lease: `done` ends it, the holder's death or `give_back` returns it to the front.

Waits are served in the order they came. A wait that cannot be met yet holds up those behind it (so that a consumer
of large batches is not starved by consumers of single items), except waits for keys, which concern nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rill.runtime.channel_state import HELD, LEASED, QUEUED, ChannelState, Item, PutWait, TakeWait, as_key
from rill.runtime.service import DEFERRED, Handler, ServiceError, group_of, name_of
from rill.runtime.shares import Shares

if TYPE_CHECKING:
    from rill.runtime.hub_machine import Machine

GRANTED, HUNGRY, EMPTY = 0, 1, 2
ANY_EPOCH = 1 << 62
ITEMS, EPOCH_END, NOTHING = 0, 1, 2
"""What a take is answered with: [one of these, items, granularity]. NOTHING: cancelled, or a choice that is gone."""


class Role(NamedTuple):
    """What a group is to a channel."""

    is_producer: bool
    is_consumer: bool
    has_other_producers: bool
    has_data: bool
    """It holds an item, or an epoch's end that the group has not seen."""


class Broker:
    """All channels."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.channels: dict[str, ChannelState] = {}
        self.shares = Shares(machine, self)
        self._leases: dict[str, dict[str, set[int]]] = {}
        """client -> channel -> ids of items it leases or whose memory it looks at."""
        self._free: dict[str, list[Any]] = {}
        self._orphans: dict[str, int] = {}
        """Store segments of dead processes -> how many items still lie in them."""

    def handlers(self) -> dict[str, Handler]:
        return {
            "create": self._create,
            "configure": self._configure,
            "put": self._put,
            "put_wait": self._put_wait,
            "cancel_put": self._cancel_put,
            "take": self._take,
            "take_by": self._take_by,
            "cancel_take": self._cancel_take,
            "settle": self._settle,
            "watch": self._watch,
            "end": self._end,
            "unend": self._unend,
            "join": self._join,
            "close": self._close,
            "put_share": self.shares.put,
            "take_share": self.shares.take,
            "cancel_share": self.shares.cancel,
        }

    def queries(self) -> dict[str, Callable[[Any], Any]]:
        return {"peek": self._peek, "stats": self._stats, "graph": self._graph, "waits": self._waits}

    # --- channels -----------------------------------------------------------------------------------------

    def _create(self, client: str, seq: int, payload: Any) -> Any:
        name, options = payload
        if (
            name in self.channels
        ):  # names are used once: what is left of a closed channel still has its items' numbers
            raise ServiceError(
                "ConfigError", f"a channel named {name!r} exists or existed: choose another name"
            )
        self.channels[name] = ChannelState(name, options, name_of(client))
        return None

    def _configure(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, {"granularity": n}]: what a plan may change while the channel is in use."""
        channel = self.open_channel(payload[0])
        channel.granularity = payload[1]["granularity"]
        return None

    def channel(self, name: str) -> ChannelState:
        try:
            return self.channels[name]
        except KeyError:
            raise ServiceError(
                "ChannelClosedError", f"channel {name!r} does not exist in this cluster"
            ) from None

    def open_channel(self, name: str) -> ChannelState:
        channel = self.channel(name)
        if channel.is_closed:
            raise ServiceError("ChannelClosedError", f"channel {name!r} is closed")
        return channel

    def _close(self, client: str, seq: int, name: str) -> Any:
        """Puts and takes fail from now on; leased items may still be finished."""
        channel = self.open_channel(name)
        channel.is_closed = True
        error = ServiceError("ChannelClosedError", f"channel {name!r} was closed by {name_of(client)}")
        waiting = [(wait.client, wait.seq) for wait in channel.takes]
        waiting += [(wait.client, wait.seq) for wait in channel.puts]
        for waiter, waiter_seq in waiting + channel.watches:
            self._machine.fail(waiter, waiter_seq, error)
        self.shares.close(name, error)
        dropped = [item for wait in channel.puts for item in wait.items]
        dropped += [item for item in channel.items.values() if item.state == QUEUED]
        channel.takes, channel.watches = [], []
        channel.puts.clear()
        channel.queues = {}
        channel.by_key = {}
        channel.num_queued = channel.queued_bytes = 0
        for item in dropped:
            channel.items.pop(item.id, None)
            self.free(item)
        return None

    # --- putting ------------------------------------------------------------------------------------------

    def _put(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, descriptors] on an unbounded channel: no reply; a refusal is pushed as "put_failed"."""
        try:
            channel = self.channel_for_put(*payload)
        except ServiceError as error:
            self._machine.push(client, "put_failed", [payload[0], error.kind, error.message])
            return DEFERRED
        producer = name_of(client)
        now_s = self._machine.now_s
        for descriptor in payload[1]:
            channel.admit(channel.new_item(producer, descriptor), now_s)
        self.serve(channel)
        return DEFERRED

    def _put_wait(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, descriptors]: answered when all of them are in."""
        channel = self.channel_for_put(*payload)
        items = [channel.new_item(name_of(client), descriptor) for descriptor in payload[1]]
        channel.puts.append(PutWait(client, seq, items, self._machine.now_s))
        self.serve(channel)
        return DEFERRED

    def channel_for_put(self, name: str, descriptors: list[Any]) -> ChannelState:
        """The open channel; when there is none, the payloads that came for it are freed."""
        try:
            return self.open_channel(name)
        except ServiceError:
            for descriptor in descriptors:
                self.free_ref(descriptor[4])
            raise

    def _cancel_put(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, seq of the put_wait]: what has no room yet is taken back; answers that put with what got in."""
        channel = self.channel(payload[0])
        for wait in channel.puts:
            if wait.client == client and wait.seq == payload[1]:
                channel.puts.remove(wait)
                self._drop_put(channel, wait)
                self._machine.reply(client, wait.seq, len(wait.items))
                self.serve(channel)
                break
        return None

    def _drop_put(self, channel: ChannelState, wait: PutWait) -> None:
        for item in wait.items:
            left = channel.unfinished[item.epoch] - 1
            channel.unfinished[item.epoch] = left
            if not left:
                del channel.unfinished[item.epoch]
            self.free(item)

    # --- taking -------------------------------------------------------------------------------------------

    def _take(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, min items (0: the channel's granularity), max items, in a loop?, done ids]: from the front."""
        name, min_items, max_items, in_loop, done = payload
        channel = self.open_channel(name)
        if min_items == 0:
            min_items = channel.granularity
            max_items = min_items if min_items > 1 else max_items
        if done:
            self._finish(channel, client, done)
        wait = TakeWait(client, seq, self._machine.now_s)
        wait.min_items, wait.max_items, wait.in_loop = min_items, max_items, in_loop
        self._add_take(channel, wait)
        return DEFERRED

    def _take_by(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, "weight" | "keys" | "ids", argument, in a loop?]."""
        name, how, argument, in_loop = payload
        channel = self.open_channel(name)
        wait = TakeWait(client, seq, self._machine.now_s)
        wait.in_loop = in_loop
        if how == "weight":
            wait.weight = argument
        elif how == "keys":
            wait.keys = [as_key(key) for key in argument]
        else:
            wait.ids = argument
        self._add_take(channel, wait)
        return DEFERRED

    def _add_take(self, channel: ChannelState, wait: TakeWait) -> None:
        name = name_of(wait.client)
        if name not in channel.consumer_epoch:
            first_seen = self._machine.membership.first_seen.get(group_of(wait.client), 0)
            channel.consumer_epoch[name] = channel.epochs_drained_before(first_seen)
        channel.takes.append(wait)
        self.serve(channel)

    def _cancel_take(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, seq of the take]: answered with NOTHING, unless it was granted already."""
        channel = self.channel(payload[0])
        for wait in channel.takes:
            if wait.client == client and wait.seq == payload[1]:
                channel.takes.remove(wait)
                self._machine.reply(client, wait.seq, [NOTHING, [], 1])
                self.serve(channel)
                break
        return DEFERRED

    def _settle(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, done ids, released ids, returned ids]; no reply."""
        name, done, released, returned = payload
        channel = self.channel(name)
        if done:
            self._finish(channel, client, done)
        held = self._leases.get(client, {}).get(name, set())
        for item_id in released:
            if item_id not in held:
                continue
            if channel.items[item_id].state == HELD:
                held.discard(item_id)
                self.free(channel.items.pop(item_id))
            else:
                channel.items[item_id].is_released = True
        if returned:
            back = [channel.items[i] for i in returned if i in held and channel.items[i].state == LEASED]
            held.difference_update(item.id for item in back)
            self._return(channel, back)
        self.serve(channel)
        return DEFERRED

    def _return(self, channel: ChannelState, items: list[Item]) -> None:
        if channel.is_closed:
            for item in items:
                del channel.items[item.id]
                self.free(item)
            return
        for item in items:
            if item.share is not None:
                self.shares.give_back(channel.name, item)
        channel.requeue([item for item in items if item.share is None])

    def _finish(self, channel: ChannelState, client: str, done: list[int]) -> None:
        held = self._leases.get(client, {}).get(channel.name, set())
        now_s = self._machine.now_s
        for item_id in done:
            if item_id not in held:
                continue
            item = channel.items[item_id]
            if item.state == LEASED:
                channel.finish(item, now_s)
                if item.share is not None:
                    self.shares.finished(channel.name, item)
            if item.ref is None or item.is_released:
                held.discard(item_id)
                self.free(channel.items.pop(item_id))

    # --- serving ------------------------------------------------------------------------------------------

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
                channel.admit(wait.items.pop(0), self._machine.now_s)
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
                is_hungry = outcome == HUNGRY
                if outcome != GRANTED:
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
                max_items = max(wait.min_items, min(max_items, fair))
            found, total = channel.front(last_epoch, max_items, wait.weight)
        is_whole = total >= wait.weight if wait.weight is not None else len(found) >= wait.min_items
        if found and (is_whole or (last_epoch < channel.epoch and not self._may_grow(channel, last_epoch))):
            self._grant(channel, wait, found)
            return GRANTED
        if not found and last_epoch < channel.num_drained:
            channel.consumer_epoch[name] += 1
            channel.takes.remove(wait)
            self._machine.reply(wait.client, wait.seq, [EPOCH_END, [], 1])
            return GRANTED
        return HUNGRY if found else EMPTY

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
        held = self._leases.setdefault(wait.client, {}).setdefault(channel.name, set())
        client = wait.client
        for item in items:
            channel.lease(item, client)
            held.add(item.id)
        self._machine.reply(client, wait.seq, [ITEMS, [item.wire() for item in items], channel.granularity])

    def lease_share(self, name: str, client: str, items: list[Item]) -> None:
        """Lease items that are not in the queue."""
        held = self._leases.setdefault(client, {}).setdefault(name, set())
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

    # --- epochs -------------------------------------------------------------------------------------------

    def _end(self, client: str, seq: int, name: str) -> Any:
        """The rule: once by the channel's creator, or once by each of `producers`, or by every rank of a group."""
        channel = self.open_channel(name)
        producer = name_of(client)
        if producer == channel.creator and channel.num_producers is None:
            channel.end_epoch(self._machine.num_events)
        else:
            epoch = max(channel.producer_epoch.get(producer, 0), channel.epoch)
            channel.producer_epoch[producer] = epoch + 1
            channel.ended_by.setdefault(epoch, set()).add(producer)
            while self._have_all_ended(channel):
                channel.end_epoch(self._machine.num_events)
        self.serve(channel)
        return channel.epoch

    def _have_all_ended(self, channel: ChannelState) -> bool:
        ended = channel.ended_by.get(channel.epoch, set())
        if not ended:
            return False
        if channel.num_producers is not None:
            return len(ended) >= channel.num_producers
        group = next(iter(sorted(group_of(name) for name in ended)))
        return len(ended) >= self._machine.membership.world_size(group)

    def _unend(self, client: str, seq: int, name: str) -> Any:
        """The epoch's end came too late for the loop that waited for it: the consumer meets it again."""
        self.channel(name).consumer_epoch[name_of(client)] -= 1
        return DEFERRED

    def _join(self, client: str, seq: int, name: str) -> Any:
        """A consumer that came late begins with the epoch that is running, not with those it missed."""
        channel = self.open_channel(name)
        channel.consumer_epoch[name_of(client)] = channel.num_drained
        return channel.num_drained

    # --- watching -----------------------------------------------------------------------------------------

    def _watch(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, version]: answered when what is queued differs from that version."""
        channel = self.open_channel(payload[0])
        if channel.version != payload[1]:
            return channel.version
        channel.watches.append((client, seq))
        return DEFERRED

    def _peek(self, payload: Any) -> Any:
        """[channel, max items]: [version, [[id, weight, key, bytes]…]]."""
        name, max_items = payload
        channel = self.channels[name]
        items, _ = channel.front(ANY_EPOCH, max_items, None)
        return [channel.version, [[i.id, i.weight, i.key, i.num_bytes] for i in items]]

    def _stats(self, name: str) -> Any:
        channel = self.channels[name]
        states = [item.state for item in channel.items.values()]
        return {
            "name": name,
            "depth": channel.num_queued,
            "queued_bytes": channel.queued_bytes,
            "leased": states.count(LEASED),
            "held": states.count(HELD),
            "epoch": channel.epoch,
            "epochs_drained": channel.num_drained,
            "granularity": channel.granularity,
            "waiting_producers": len(channel.puts),
            "waiting_consumers": len(channel.takes),
            "num_redelivered": channel.num_redelivered,
            "is_closed": channel.is_closed,
            "producers": channel.producers,
            "consumers": channel.consumers,
        }

    def _graph(self, _payload: Any) -> Any:
        """What flowed: {channel: {"producers": {name: [items, bytes, last]}, "consumers": {...}}}."""
        return {
            name: {"producers": channel.producers, "consumers": channel.consumers}
            for name, channel in self.channels.items()
        }

    def _waits(self, _payload: Any) -> Any:
        """Who waits on which channel: [client, channel, "put" | "take", since]."""
        waits = []
        for name, channel in self.channels.items():
            waits += [[w.client, name, "take", w.since_s] for w in channel.takes]
            waits += [[w.client, name, "put", w.since_s] for w in channel.puts]
        waits += [[client, what, "take_share", since_s] for client, what, since_s in self.shares.waiting()]
        return waits

    # --- for the device locks -----------------------------------------------------------------------------

    def role_of(self, group: str, name: str) -> Role:
        """What a group is to a channel, as far as traffic has shown."""
        channel = self.channels.get(name)
        if channel is None:
            return Role(False, False, False, False)
        producers = {group_of(producer) for producer in channel.producers}
        consumers = [consumer for consumer in channel.consumer_epoch if group_of(consumer) == group]
        is_behind = any(channel.consumer_epoch[consumer] < channel.epoch for consumer in consumers)
        has_data = channel.num_queued > 0 or channel.is_closed or is_behind
        if not consumers and channel.epoch:
            first_seen = self._machine.membership.first_seen.get(group, 0)
            has_data = has_data or channel.epochs_drained_before(first_seen) < channel.epoch
        return Role(group in producers, bool(consumers), bool(producers - {group}), has_data)

    def blocked_on(self) -> dict[str, set[str]]:
        """client -> channels on which it waits."""
        blocked: dict[str, set[str]] = {}
        for name, channel in self.channels.items():
            clients = [wait.client for wait in channel.takes] + [wait.client for wait in channel.puts]
            for client in clients:
                blocked.setdefault(client, set()).add(name)
        return blocked

    # --- memory and deaths --------------------------------------------------------------------------------

    def free(self, item: Item) -> None:
        self.free_ref(item.ref)

    def free_ref(self, ref: Any) -> None:
        """Tell the owner of the memory, or count down to the file's end when the owner is dead."""
        if ref is None:
            return
        owner, segment = ref[1], ref[2]
        if self._machine.membership.is_alive(owner):
            self._free.setdefault(owner, []).append([segment, ref[3]])
        elif segment in self._orphans:
            self._orphans[segment] -= 1
            if self._orphans[segment] == 0:
                del self._orphans[segment]
                self._unlink(segment)

    def settle(self) -> None:
        """At the end of an event: one message per owner of freed memory."""
        if self._free:
            free, self._free = self._free, {}
            for owner, slots in free.items():
                self._machine.push(owner, "store_free", slots)

    def end_client(self, client: str) -> None:
        for name, ids in self._leases.pop(client, {}).items():
            channel = self.channels[name]
            back = []
            for item_id in sorted(ids):
                item = channel.items[item_id]
                if item.state == LEASED:
                    back.append(item)
                else:
                    self.free(channel.items.pop(item_id))
            channel.num_redelivered += len(back)
            self._return(channel, back)
        self.shares.end_client(client)
        for channel in self.channels.values():
            channel.takes = [w for w in channel.takes if w.client != client]
            channel.watches = [w for w in channel.watches if w[0] != client]
        self._adopt_segments(client)
        for channel in self.channels.values():
            self.serve(channel)

    def _adopt_segments(self, client: str) -> None:
        """Memory that outlives its process: count what still lies there, delete the rest."""
        self._free.pop(client, None)
        kept: dict[str, int] = {}
        for item in self._all_items():
            if item.ref is not None and item.ref[1] == client:
                kept[item.ref[2]] = kept.get(item.ref[2], 0) + 1
        self._orphans.update(kept)
        self._unlink([client, sorted(kept)])

    def _unlink(self, order: Any) -> None:
        """A file's name, or [dead owner, files to keep]: for the hub's own node and every node's store server."""
        self._machine.unlinks.append(order)
        for member, info in self._machine.membership.members.items():
            if info.get("serves_store"):
                self._machine.push(member, "store_unlink", order)

    def _all_items(self) -> list[Item]:
        items = [item for channel in self.channels.values() for item in channel.items.values()]
        return items + [item for c in self.channels.values() for wait in c.puts for item in wait.items]
