"""What processes say to the hub about channels and devices, and what it answers: one typed record each.

On the wire every record is an array (msgspec). The registry's requests are plain values (membership.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from rill.runtime.transfer.segments import Ref


class _Message(msgspec.Struct, array_like=True, gc=False):
    """A record that is an array on the wire."""


# --- channels ---------------------------------------------------------------------------------------------


class ChannelOptions(_Message):
    """What a channel is made with."""

    name: str
    capacity_items: int | None = None
    capacity_bytes: int | None = None
    granularity: int = 1
    max_failures: int = 3


class Configure(_Message):
    """What a plan may change while a channel is in use."""

    channel: str
    granularity: int


class Descriptor(_Message):
    """An item on its way in: everything but the payload, or the payload too where it is small."""

    weight: float
    key: Any
    num_bytes: int
    inline: bytes | list[bytes] | None
    ref: Ref | None


class Item(_Message):
    """An item on its way out."""

    id: int
    weight: float
    key: Any
    num_bytes: int
    inline: bytes | list[bytes] | None
    ref: Ref | None


class Puts(_Message):
    """Items for one channel, in order."""

    channel: str
    items: list[Descriptor]


class Done(_Message):
    """Items of one channel that are dealt with."""

    channel: str
    ids: list[int]


class Commit(_Message):
    """Finish what was taken and put what came of it: all of it, or nothing. A plain put finishes nothing."""

    done: list[Done]
    puts: list[Puts]
    wants_reply: bool = False
    """Answered, with 0, when every item is in; otherwise a refusal is pushed ("commit_failed")."""


class Take(_Message):
    """Items from the front, or by key."""

    channel: str
    min_items: int = 1
    """0: the channel's granularity."""
    max_items: int = 1
    """More than the least only where the queue has enough for every consumer."""
    in_loop: bool = False
    """Bounded by the consumer's epoch; may be answered with the epoch's end."""
    weight: float | None = None
    """Until the weights reach this."""
    keys: list[Any] | None = None
    """Exactly one item of each, in this order."""


class GrantKind(IntEnum):
    """How a take is answered."""

    ITEMS = 0
    EPOCH_END = 1
    NOTHING = 2
    """It was cancelled."""


class Grant(_Message):
    """The answer to a take."""

    kind: GrantKind
    items: list[Item]
    num_wanted: int = 1
    """How many of them make one chunk; the rest was read ahead."""


NOTHING = Grant(GrantKind.NOTHING, [])
EPOCH_END = Grant(GrantKind.EPOCH_END, [])


class Cancel(_Message):
    """Take a wait back: a Take, or the part of a Commit that has no room yet. The wait is answered in any case."""

    channel: str
    seq: int
    """The number of the request."""


class Settle(_Message):
    """Memory that nobody looks at any more, and items that nobody began to work on."""

    channel: str
    released: list[int]
    returned: list[int]


class GiveBack(_Message):
    """Items whose consumer failed at them: somebody else may try, up to the channel's limit."""

    channel: str
    ids: list[int]
    error: str


# --- devices ----------------------------------------------------------------------------------------------


class Acquire(_Message):
    """Ask for the group's turn; answered with the turn's number."""

    devices: list[int]
    """Of this rank."""
    channels: list[str]
    """What the work is between: they give the order."""
    is_resumed: bool
    """Its data is in hand: the turn was lent while it waited, or it needs none."""


class Evict(_Message):
    """Pushed to a process: give the device memory back."""

    number: int
    """Of the eviction; its answer repeats it."""
    turn: int
    """The turn that is asked to be lent; 0: the process has none, its memory is just in the way."""


class Evicted(_Message):
    """The answer to an Evict."""

    number: int
    is_kept: bool
    """The process works again already, and keeps its memory."""
