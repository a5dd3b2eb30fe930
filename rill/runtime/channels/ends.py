"""Both ends of one channel in one process, and what happens to them when a call ends.

`Channel` (channel.py) is the handle that travels; the ends stay: made at a process's first use of the channel, kept in
its context, closed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rill.runtime.channels.consumer import Consumer
from rill.runtime.channels.lease import end_call
from rill.runtime.channels.producer import HUB_S, Producer

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What a handle carries."""

    name: str
    is_bounded: bool
    timeout_s: float
    """The deadline of every wait that gives none of its own."""


@dataclass(frozen=True, slots=True)
class ChannelEnds:
    """Thread-safe."""

    producer: Producer
    consumer: Consumer

    def close(self) -> None:
        self.consumer.return_ahead()
        self.consumer.close()


def ends_of(settings: ChannelSettings, context: RuntimeContext) -> ChannelEnds:
    """The ends of a channel in `context`, opened at first use."""
    ends = context.channels.get(settings.name)
    if ends is None:
        with context.lock:
            ends = context.channels.get(settings.name)
            if ends is None:
                producer = Producer(
                    context, settings.name, is_bounded=settings.is_bounded, timeout_s=settings.timeout_s
                )
                ends = context.channels[settings.name] = ChannelEnds(producer, Consumer(context, producer))
    return ends


def settle_call(context: RuntimeContext) -> None:
    """A call that ran in this thread is about to answer: it is done with what it took, and when this returns the broker
    knows that and has what it put. Whoever hears the answer may end the epoch, or kill the process, and nothing is
    lost or delivered again."""
    end_call(None)
    channels = list(context.channels.values())
    has_passed = [ends.consumer.pass_end() for ends in channels]
    if any(has_passed) or (channels and context.hub.has_unconfirmed):
        context.hub.sync(HUB_S)
        for ends in channels:
            ends.producer.check()
