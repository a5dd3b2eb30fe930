"""What the driver keeps about its groups: how each was launched, and the process of each of its ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from rill.runtime.address import WorkerAddress
from rill.runtime.device.placement import Seat
from rill.runtime.handle import Handle
from rill.runtime.hub.messages import Roster
from rill.runtime.process.mailbox import Frames
from rill.runtime.worker import Worker

_versions = itertools.count(1)


@dataclass(slots=True, eq=False)
class Member:
    """The process of one rank. A relaunched rank has another."""

    group: Group
    seat: Seat
    address: WorkerAddress
    """Who it is and, once it has said hello, where."""
    ready: Handle
    is_running: bool = True
    is_leaving: bool = False
    """It was asked to end: its end is no news."""
    goodbye: Handle | None = None
    """Of its last call, before which all that it answered has arrived."""

    @property
    def identity(self) -> str:
        return self.address.identity

    @property
    def has_said_hello(self) -> bool:
        return bool(self.address.endpoint)

    @property
    def is_settled(self) -> bool:
        """Whether it can be called, or never will be."""
        return self.has_said_hello or not self.is_running

    @property
    def is_lost(self) -> bool:
        return not self.is_running or any(o is not None and o.error for o in self.ready.so_far())


@dataclass(slots=True, eq=False)
class Group:
    """What is needed to start a group's processes, now and again, and those that it has."""

    cls: type[Worker]
    name: str
    env: Mapping[str, str]
    threads: int | None
    """Of each process; None: its share of the node's cores."""
    init_payload: Frames
    members: dict[int, Member] = field(default_factory=dict)
    """By rank, in order."""
    next_rank: int = 0
    """An id is not given twice."""
    version: int = 0
    """Grows with every change, also from one group of a name to the next."""
    roster: Roster | None = None
    changing: threading.RLock = field(default_factory=threading.RLock)
    """Held by a relaunch, an addition, a removal and a move."""

    def changed(self) -> None:
        self.version = next(_versions)
        self.roster = None
