"""Both ends of one channel in one process (or rank): what `Channel` does with its ports, its store and its lock.

`Channel` (channel.py) is the handle that travels; the ends stay: made at a process's first use of the channel, kept in
its context, closed with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rill.errors import ConfigError, RunError
from rill.runtime.channels.consumer import ConsumerPort, WireItem
from rill.runtime.channels.producer import INLINE_BYTES, Descriptor, ProducerPort
from rill.runtime.context import RuntimeContext
from rill.runtime.device.lock import lock_of
from rill.runtime.hub.answer import Pending
from rill.runtime.hub.grants import EPOCH_END, ITEMS, NOTHING
from rill.runtime.process.report import stuck, waiting
from rill.runtime.transfer.wire import encode

HUB_S = 30.0
"""What the hub is given to answer what needs no waiting."""


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What a handle carries."""

    name: str
    is_bounded: bool
    timeout_s: float
    """The deadline of every wait that gives none of its own."""


class ChannelEnds:
    """Thread-safe."""

    def __init__(self, settings: ChannelSettings, context: RuntimeContext) -> None:
        self.settings = settings
        self.context = context
        self.name = settings.name
        hub, store = context.hub, context.store
        self.producer = ProducerPort(hub, store, settings.name)
        self.consumer = ConsumerPort(
            hub, store, settings.name, reads_ahead=not settings.is_bounded, device=context.torch_device
        )

    def close(self) -> None:
        self.producer.seal()
        self.consumer.put_back()
        self.consumer.close()

    def limit_s(self, timeout_s: float | None) -> float:
        return self.settings.timeout_s if timeout_s is None else timeout_s

    def deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + self.limit_s(timeout_s)

    # --- putting ------------------------------------------------------------------------------------------

    def descriptor(self, obj: Any, weight: float, key: Any, deadline_s: float) -> Descriptor:
        """What the broker is told of an object, whose payload stays in this node's store unless it is small."""
        encoded = encode(obj)
        weight = float(weight)
        if encoded.num_bytes <= INLINE_BYTES:
            inline: Any = encoded.header
            if encoded.buffers:
                inline = [encoded.header, *(bytes(buffer) for buffer in encoded.buffers)]
            return [weight, key, encoded.num_bytes, inline, None]
        ref = self.context.store.write(encoded, max(0.0, deadline_s - time.monotonic()))
        return [weight, key, encoded.num_bytes, None, ref]

    def put(self, obj: Any, weight: float, key: Any, timeout_s: float | None) -> None:
        """One object: what most puts are."""
        if self.settings.is_bounded:
            self.put_all([(obj, weight)], key, timeout_s)
            return
        deadline_s = self.deadline(timeout_s)
        if not self.producer.put(self.descriptor(obj, weight, key, deadline_s), deadline_s):
            raise stuck(self.context, f"put to channel {self.name!r}", self.limit_s(timeout_s))

    def put_all(self, weighted: list[tuple[Any, float]], key: Any, timeout_s: float | None) -> None:
        """Several; on a bounded channel returns when all of them are in."""
        deadline_s = self.deadline(timeout_s)
        descriptors = [self.descriptor(obj, weight, key, deadline_s) for obj, weight in weighted]
        if self.settings.is_bounded:
            self._put_bounded(descriptors, deadline_s, self.limit_s(timeout_s))
            return
        for n, descriptor in enumerate(descriptors):
            if not self.producer.put(descriptor, deadline_s):
                what = f"put {n} of {len(descriptors)} to channel {self.name!r}"
                raise stuck(self.context, what, self.limit_s(timeout_s))

    async def put_async(self, obj: Any, weight: float, key: Any, timeout_s: float | None) -> None:
        """One object, without blocking the event loop while the channel is full."""
        if not self.settings.is_bounded:
            self.put(obj, weight, key, timeout_s)
            return
        limit_s = self.limit_s(timeout_s)
        deadline_s = time.monotonic() + limit_s
        descriptor = await asyncio.to_thread(self.descriptor, obj, weight, key, deadline_s)
        pending, future = self.context.hub.future()
        self.producer.put_bounded([descriptor], pending)
        what = f"room in channel {self.name!r}"
        try:
            with waiting(what, f"channel:{self.name}"):
                await asyncio.wait_for(future, deadline_s - time.monotonic())
        except asyncio.CancelledError:
            self.producer.cancel(pending)
            raise
        except TimeoutError:
            error = stuck(self.context, what, limit_s)  # while it still waits, so that the report shows it
            self.producer.cancel(pending)
            if not await asyncio.to_thread(pending.wait, HUB_S) or pending.result():
                raise error from None
        pending.result()

    def _put_bounded(self, descriptors: list[Descriptor], deadline_s: float, limit_s: float) -> None:
        pending = Pending()
        self.producer.put_bounded(descriptors, pending)
        what = f"room in channel {self.name!r} for {len(descriptors)} items"
        if self.wait_until(pending, deadline_s, what):
            pending.result()
            return
        error = stuck(self.context, what, limit_s)  # while it still waits, so that the report shows it
        self.producer.cancel(pending)
        if not pending.wait(HUB_S):
            raise RunError(f"{self.name}: the hub does not answer: it is not known whether the put got in")
        num_left_out = pending.result()
        if num_left_out:
            error.add_note(f"{len(descriptors) - num_left_out} of {len(descriptors)} items got in")
            raise error

    # --- taking -------------------------------------------------------------------------------------------

    def take_front(
        self, holder: object, deadline_s: float, *, min_items: int, in_loop: bool, is_exact: bool = False
    ) -> list[WireItem] | None:
        """Items from the front; None at the epoch's end. `is_exact` gives a whole chunk, otherwise one item."""
        item = self.consumer.next_buffered(holder, in_loop=in_loop)
        if item is not None:
            return [item]
        pending = Pending()
        self.consumer.request(pending, min_items=min_items, in_loop=in_loop)
        kind, items, granularity = self.wait(pending, deadline_s, ("cancel_take",))
        if kind == EPOCH_END:
            return None
        num_wanted = max(min_items, granularity if min_items == 0 else 1) if is_exact else 1
        return self.consumer.accept(holder, items, num_wanted=num_wanted, in_loop=in_loop)

    def take_by(
        self, holder: object, how: str, argument: Any, deadline_s: float, *, in_loop: bool
    ) -> list[WireItem] | None:
        """Items by "weight", "keys" or "ids"; None at the epoch's end, or when a choice is gone."""
        pending = Pending()
        self.consumer.request_by(pending, holder, how, argument, in_loop=in_loop)
        kind, items, _ = self.wait(pending, deadline_s, ("cancel_take",))
        if kind in (EPOCH_END, NOTHING):
            return None
        assert kind == ITEMS
        return self.consumer.accept(holder, items, num_wanted=len(items), in_loop=in_loop)

    def wait(self, pending: Pending, deadline_s: float, cancel: tuple[Any, ...]) -> Any:
        """The broker's answer to a take; past the deadline it is cancelled."""
        started_s = time.monotonic()
        what = f"take from channel {self.name!r}"
        if not self.wait_until(pending, deadline_s, what):
            error = stuck(self.context, what, deadline_s - started_s)
            if self.consumer.give_up(pending, *cancel):
                raise error
        return pending.result()

    async def answer(self, request: Callable[[Pending], None], timeout_s: float | None) -> Any:
        """The broker's answer to a take that `request` sends, on an event loop."""
        pending, future = self.context.hub.future()
        request(pending)
        what, limit_s = f"take from channel {self.name!r}", self.limit_s(timeout_s)
        try:
            with waiting(what, f"channel:{self.name}"):
                await asyncio.wait_for(future, limit_s)
        except asyncio.CancelledError:
            if not self.consumer.give_up(pending, "cancel_take"):
                self.consumer.send_back(pending)  # it has just come, and nobody wants it any more
            raise
        except TimeoutError:
            error = stuck(self.context, what, limit_s)
            if self.consumer.give_up(pending, "cancel_take"):
                raise error from None
        return pending.result()

    def wait_until(self, pending: Pending, deadline_s: float, what: str) -> bool:
        """Wait by name; a device lock held here may be lent meanwhile, and is held again afterwards."""
        if pending.wait(0.0):
            return True
        with waiting(what, f"channel:{self.name}"):
            lock = lock_of(self.context)
            if lock is None or not lock.is_held:
                return pending.wait(deadline_s - time.monotonic())
            with lock.lending():
                return pending.wait(deadline_s - time.monotonic())


def ends_of(settings: ChannelSettings, context: RuntimeContext) -> ChannelEnds:
    """The ends of a channel in `context`, opened at first use."""
    key = f"channel:{settings.name}"
    ends: ChannelEnds | None = context.services.get(key)
    if ends is None:
        with context.lock:
            ends = context.services.get(key)
            if ends is None:
                ends = context.services[key] = ChannelEnds(settings, context)
    return ends


def checked_key(channel: str, key: Any) -> Any:
    """`key` if it can be one."""
    if key is None or isinstance(key, (str, int, float, bool)):
        return key
    if isinstance(key, tuple):
        return tuple(checked_key(channel, part) for part in key)
    raise ConfigError(
        f"{channel}: a key is text, a number or a tuple of them; got {type(key).__name__}: {key!r}"
    )


def settle_call(context: RuntimeContext) -> None:
    """A call that ran in this thread is about to answer: it is done with what it took, and when this returns the broker
    knows that and has what it put. Whoever hears the answer may end the epoch, or kill the process, and nothing is
    lost or delivered again."""
    finish_call(context)
    ends = [service for service in list(context.services.values()) if isinstance(service, ChannelEnds)]
    sending = [one.producer for one in ends if one.producer.has_unconfirmed]
    for producer in sending:
        producer.seal()
    has_finished = [one.consumer.settle() for one in ends]
    if sending or any(has_finished):
        context.hub.call("registry", "sync", None, HUB_S)
    for producer in sending:
        producer.check()


def finish_call(context: RuntimeContext) -> None:
    """A call that ran in this thread has ended, in whatever way: it is done with everything it took."""
    holder = threading.get_ident()
    for service in list(context.services.values()):
        if isinstance(service, ChannelEnds):
            service.consumer.finish(holder)
