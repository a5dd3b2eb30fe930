"""The channel broker: descriptors, leases, epochs and back-pressure of every channel. A service of the hub.

Payloads never come here. Its traffic is one descriptor per item each way, batched by the clients, whatever the size
of the payload. Every take is a lease: `done` ends it, the holder's death or `give_back` returns it to the front.

What the parts own: `grants` leases and their rules, `shares` redistributions, `ledger` the payloads' memory, `view`
what can be seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rill.runtime.hub.channel_state import HELD, LEASED, QUEUED, ChannelState, Item, PutWait, TakeWait, as_key
from rill.runtime.hub.grants import NOTHING, Grants
from rill.runtime.hub.ledger import PayloadLedger
from rill.runtime.hub.service import DEFERRED, Handler, ServiceError, group_of, name_of
from rill.runtime.hub.shares import Shares
from rill.runtime.hub.view import BrokerView

if TYPE_CHECKING:
    from rill.runtime.hub.state import Machine


class Broker:
    """All channels."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.channels: dict[str, ChannelState] = {}
        self.ledger = PayloadLedger(machine)
        self.grants = Grants(machine)
        self.shares = Shares(machine, self)
        self.view = BrokerView(machine, self.channels, self.shares)

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
            "close": self._close,
            "put_share": self.shares.put,
            "take_share": self.shares.take,
            "cancel_share": self.shares.cancel,
        }

    def queries(self) -> dict[str, Callable[[Any], Any]]:
        return self.view.queries()

    # --- channels -----------------------------------------------------------------------------------------

    def _create(self, client: str, seq: int, payload: Any) -> Any:
        name, options = payload
        if name in self.channels:  # also a closed one: what is left of it still has its items' numbers
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
            self.ledger.free(item)
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
        channel.admit([channel.new_item(producer, one) for one in payload[1]], self._machine.now_s)
        self.grants.serve(channel)
        return DEFERRED

    def _put_wait(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, descriptors]: answered when all of them are in."""
        channel = self.channel_for_put(*payload)
        items = [channel.new_item(name_of(client), descriptor) for descriptor in payload[1]]
        channel.puts.append(PutWait(client, seq, items, self._machine.now_s))
        self.grants.serve(channel)
        return DEFERRED

    def channel_for_put(self, name: str, descriptors: list[Any]) -> ChannelState:
        """The open channel; when there is none, the payloads that came for it are freed."""
        try:
            return self.open_channel(name)
        except ServiceError:
            for descriptor in descriptors:
                self.ledger.free_ref(descriptor[4])
            raise

    def _cancel_put(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, seq of the put_wait]: what has no room yet is taken back; answers that put with what got in."""
        channel = self.channel(payload[0])
        for wait in channel.puts:
            if wait.client == client and wait.seq == payload[1]:
                channel.puts.remove(wait)
                self._drop_put(channel, wait)
                self._machine.reply(client, wait.seq, len(wait.items))
                self.grants.serve(channel)
                break
        return None

    def _drop_put(self, channel: ChannelState, wait: PutWait) -> None:
        for item in wait.items:
            left = channel.unfinished[item.epoch] - 1
            channel.unfinished[item.epoch] = left
            if not left:
                del channel.unfinished[item.epoch]
            self.ledger.free(item)

    # --- taking -------------------------------------------------------------------------------------------

    def _take(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, min items (0: the channel's granularity), items that may be one consumer's though others wait,
        max items, in a loop?, done ids]: from the front."""
        name, min_items, at_once, max_items, in_loop, done = payload
        channel = self.open_channel(name)
        if min_items == 0:
            min_items = channel.granularity
            max_items = min_items if min_items > 1 else max_items
        if done:
            self._finish(channel, client, done)
        wait = TakeWait(client, seq, self._machine.now_s)
        wait.min_items, wait.at_once, wait.max_items, wait.in_loop = min_items, at_once, max_items, in_loop
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
        self.grants.serve(channel)

    def _cancel_take(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, seq of the take]: answered with NOTHING, unless it was granted already."""
        channel = self.channel(payload[0])
        for wait in channel.takes:
            if wait.client == client and wait.seq == payload[1]:
                channel.takes.remove(wait)
                self._machine.reply(client, wait.seq, [NOTHING, [], 1])
                self.grants.serve(channel)
                break
        return DEFERRED

    def _settle(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, done ids, released ids, returned ids]; no reply."""
        name, done, released, returned = payload
        channel = self.channel(name)
        if done:
            self._finish(channel, client, done)
        held = self.grants.held(client, name)
        for item_id in released:
            if item_id not in held:
                continue
            if channel.items[item_id].state == HELD:
                held.discard(item_id)
                self.ledger.free(channel.items.pop(item_id))
            else:
                channel.items[item_id].is_released = True
        if returned:
            back = [channel.items[i] for i in returned if i in held and channel.items[i].state == LEASED]
            held.difference_update(item.id for item in back)
            self._return(channel, back)
        self.grants.serve(channel)
        return DEFERRED

    def _return(self, channel: ChannelState, items: list[Item]) -> None:
        if channel.is_closed:
            for item in items:
                del channel.items[item.id]
                self.ledger.free(item)
            return
        for item in items:
            if item.share is not None:
                self.shares.give_back(channel.name, item)
        channel.requeue([item for item in items if item.share is None])

    def _finish(self, channel: ChannelState, client: str, done: list[int]) -> None:
        held = self.grants.held(client, channel.name)
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
                self.ledger.free(channel.items.pop(item_id))

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
        self.grants.serve(channel)
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

    # --- watching -----------------------------------------------------------------------------------------

    def _watch(self, client: str, seq: int, payload: Any) -> Any:
        """[channel, version]: answered when what is queued differs from that version."""
        channel = self.open_channel(payload[0])
        if channel.version != payload[1]:
            return channel.version
        channel.watches.append((client, seq))
        return DEFERRED

    # --- memory and deaths --------------------------------------------------------------------------------

    def end_client(self, client: str) -> None:
        for name, ids in self.grants.leases.pop(client, {}).items():
            channel = self.channels[name]
            back = []
            for item_id in sorted(ids):
                item = channel.items[item_id]
                if item.state == LEASED:
                    back.append(item)
                else:
                    self.ledger.free(channel.items.pop(item_id))
            channel.num_redelivered += len(back)
            self._return(channel, back)
        self.shares.end_client(client)
        for channel in self.channels.values():
            channel.takes = [w for w in channel.takes if w.client != client]
            channel.watches = [w for w in channel.watches if w[0] != client]
        self.ledger.end_owner(client, self._all_items())
        for channel in self.channels.values():
            self.grants.serve(channel)

    def settle(self) -> None:
        """At the end of an event: tell owners of their freed memory."""
        self.ledger.tell()

    def _all_items(self) -> list[Item]:
        items = [item for channel in self.channels.values() for item in channel.items.values()]
        return items + [item for c in self.channels.values() for wait in c.puts for item in wait.items]
