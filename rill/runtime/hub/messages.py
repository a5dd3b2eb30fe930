"""What goes over the line between a process and the hub: one typed record each, on the wire an array (msgspec).

    process ──▶ Requests (numbered, journaled)
    process ◀── Output (numbered replies and pushes) · Gap (send again from here)

Below these, what requests say of groups, channels and devices. What else the registry hears are plain values
(membership.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from rill import errors
from rill.errors import RillError, RunError
from rill.runtime.address import WorkerAddress
from rill.runtime.transfer.segments import Ref


class OutKind(IntEnum):
    REPLY = 0
    FAILURE = 1
    PUSH = 2


class _Message(msgspec.Struct, array_like=True, gc=False):
    """A record that is an array on the wire."""


def refusal(error: RillError) -> tuple[str, str]:
    """How an error of the hub's goes to a client."""
    return type(error).__name__, str(error)


def as_error(kind: str, message: str) -> RillError:
    """A refusal as the exception it stands for."""
    cls = vars(errors).get(kind, RunError)
    assert isinstance(cls, type) and issubclass(cls, RillError)
    return cls(message)


# --- the line ---------------------------------------------------------------------------------------------

Request = tuple[str, msgspec.Raw]


class Requests(_Message):
    """Consecutive requests; applied once each, in order. None: a ping, which says how far both directions are."""

    first_seq: int
    received_out: int
    """The last numbered output that the process has."""
    requests: list[Request]


class Output(_Message, tag="o"):
    """Replies and pushes, and the number of the next request that the hub expects: all before it are journaled."""

    expected: int
    entries: list[tuple[int, OutKind, int | str, msgspec.Raw]]
    """(number, kind, seq of the request or topic of the push, body)."""


class Gap(_Message, tag="g"):
    expected: int
    """0: the hub takes this process for dead."""


FromHub = Output | Gap


# --- groups -----------------------------------------------------------------------------------------------


class Roster(_Message):
    """The driver's word on a group: who is in it, on what, and whom a call to it reaches."""

    group: str
    version: int
    launches: dict[int, int]
    """Rank -> the number of its launch; none: the group is closed."""
    devices: dict[int, list[int]]
    """Rank -> the ids of its devices."""
    addresses: list[WorkerAddress]
    """Whom calls reach, in the order of ranks; none while the group is about to start."""


# --- channels ---------------------------------------------------------------------------------------------


class ChannelOptions(_Message):
    name: str
    capacity_items: int | None = None
    capacity_bytes: int | None = None
    max_failures: int = 3

    @property
    def is_bounded(self) -> bool:
        return self.capacity_items is not None or self.capacity_bytes is not None


class Item(_Message):
    """What the broker is told, and tells, of an object: everything but the payload, or that too where it is small."""

    weight: float
    key: Any
    num_bytes: int
    inline: bytes | None
    ref: Ref | None
    id: int = 0
    """In its channel, from 1: the broker's."""


class Puts(_Message):
    """Items for one channel, in order."""

    channel: str
    items: list[Item]


class Ids(_Message):
    """Items of one channel: those that are dealt with, or whose memory nobody looks at any more."""

    channel: str
    ids: list[int]


class Commit(_Message):
    """Finish what was taken and put what came of it: all of it, or nothing. A plain put finishes nothing."""

    done: list[Ids]
    puts: list[Puts]
    wants_reply: bool = False
    """Answered, with 0, when every item is in; otherwise a refusal is pushed ("commit_failed")."""


class Take(_Message):
    """Items from the front, or by key."""

    channel: str
    max_items: int = 1
    """More than one only where the queue has enough for every consumer."""
    in_loop: bool = False
    """Bounded by the consumer's epoch; may be answered with the epoch's end."""
    epoch: int | None = None
    """That one, counted from 0; unset: the one after the last whose end the consumer met."""
    keys: list[Any] | None = None
    """Exactly one item of each, in this order."""


class Grant(_Message):
    """The answer to a take: items, or the end of a loop's epoch, or, where it was cancelled, neither."""

    items: list[Item]
    is_end: bool = False


class GiveBack(_Message):
    """Items that are somebody else's again. With an error the consumer failed at them: that is counted, up to the
    channel's limit."""

    channel: str
    ids: list[int]
    error: str = ""


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
    number: int
    is_kept: bool
    """The process works again already, and keeps its memory."""
