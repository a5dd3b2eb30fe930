"""A group of workers of one class, called as one: every public method of the class is a method of the group.

    handle = group.generate(prompts, rollouts)     # on every rank, returns at once
    handle = group.on(0, 2).stats()                # on ranks 0 and 2
    results = handle.wait(timeout_s=60)

A group may be passed to other workers as an argument; they call it directly, without the driver. Calls go to those who
are members when the call is made. Only the driver changes a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rill.errors import UserError
from rill.registry import unknown_name_message
from rill.runtime.address import WorkerAddress
from rill.runtime.context import RuntimeContext, current
from rill.runtime.handle import DEFAULT_WAIT_S, Handle
from rill.runtime.hub.messages import Roster
from rill.runtime.process.call import encode_arguments
from rill.runtime.worker import Worker, callable_methods

if TYPE_CHECKING:
    from rill.runtime.device.placement import Placement
    from rill.runtime.process.supervisor import Supervisor

W_co = TypeVar("W_co", bound=Worker, covariant=True)


def check_class(cls: type[Worker]) -> None:
    """UserError where a group of this class could not be launched or called."""
    if "<locals>" in cls.__qualname__:
        raise UserError(f"{cls.__qualname__} is defined inside a function: move it to the top of a module")
    hidden = sorted(set(callable_methods(cls)) & {n for n in vars(WorkerGroup) if n[0] != "_"})
    if hidden:
        raise UserError(
            f"{cls.__qualname__}.{hidden[0]}() cannot be called through its group, whose own method has that "
            "name: rename it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a group's move took with it, and how long it took."""

    group: str
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    state_bytes: int
    """What the workers' `state` gave; 0 where it gave nothing."""
    seconds: float
    """From asking for the state to its restoration."""


class WorkerGroup(Generic[W_co]):
    """The driver's view of a group, or of some of its ranks."""

    def __init__(
        self,
        cls: type[W_co],
        name: str,
        members: Supervisor | _GivenMembers,
        selected: tuple[int, ...] | None = None,
    ) -> None:
        """`members`: who is in it; the supervisor of the cluster that launched it can also change it. `selected`: the
        ranks that calls go to; None: all that are there."""
        self.name = name
        self._cls = cls
        self._members = members
        self._selected = selected
        self._methods = callable_methods(cls)
        self._targets: tuple[Roster | None, Sequence[WorkerAddress]] = (None, ())
        """Whom calls go to, of the members at the last call."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ids of its members now. An id is never given to another rank, so there may be gaps."""
        return self._selected or self._members.ranks(self.name)

    @property
    def devices(self) -> dict[int, tuple[int, ...]]:
        return self._owner.devices_of(self.name)

    def on(self, *ranks: int) -> WorkerGroup[W_co]:
        """Some of the ranks, for calls to them alone."""
        self._check_ranks(ranks, self.ranks)
        return WorkerGroup(self._cls, self.name, self._members, ranks)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        """Call by name; `group.method(...)` is the same."""
        is_concurrent = self._check_method(method)
        encoded = encode_arguments(args, kwargs)
        roster, targets = self._members.roster(self.name), self._targets
        if roster is not targets[0]:
            targets = self._targets = (roster, self._select(roster.addresses))
        return self._members.context.call(self.name, method, targets[1], encoded, concurrent=is_concurrent)

    def ready(self, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until every rank's `__init__` has run; raises what the first failing one raised. The others live on:
        `relaunch` the ranks that are `lost()`, or `close` the group."""
        if not isinstance(self._members, _GivenMembers):  # a group can only be given away once it is ready
            self._members.wait_ready(self.name, timeout_s)

    def lost(self) -> list[int]:
        """The ranks whose process has ended or whose `__init__` failed: `relaunch` or `remove` them."""
        return self._members.lost(self.name)

    def relaunch(self, rank: int, *, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Start a rank again, in a new process, with the arguments of its launch. A live one is ended first."""
        self.on(rank)
        self._owner.relaunch(self.name, rank, timeout_s)

    def add(
        self,
        *,
        placement: Placement | None = None,
        count: int | None = None,
        timeout_s: float = DEFAULT_WAIT_S,
    ) -> list[int]:
        """Start more ranks, on `placement` or `count` of them on devices that no group has; gives their ids, once they
        are ready. Calls made from then on go to them too. Should one fail to start, the group is as before."""
        return self._owner.add(self.name, placement, count, timeout_s)

    def remove(self, *ranks: int, notice_s: float = 0.0) -> None:
        """Take ranks out. They get no new calls; with notice they are told (`Worker.notice`) and have so long to finish
        the calls before and to `close`; what is left then is killed, and calls it did not answer fail."""
        self.on(*ranks)
        self._owner.remove(self.name, ranks, notice_s)

    def move(self, placement: Placement, *, timeout_s: float = DEFAULT_WAIT_S) -> Move:
        """End the group's processes after the calls before, and start it on `placement`, which may have another size,
        with what `Worker.state` gave. Name, channels and locks stay; ranks count from 0 again. Should it fail to start
        there, it is started where it was, and the error says so."""
        return self._owner.move(self.name, placement, timeout_s)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """End the workers: those idle run their `close`, those busy past the time are killed. Safe to call twice."""
        self._owner.close_group(self.name, timeout_s)

    def addresses(self) -> list[WorkerAddress]:
        return list(self._members.roster(self.name).addresses)

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        if method.startswith("_"):
            raise AttributeError(method)
        self._check_method(method)
        call = vars(self)[method] = functools.partial(self.call, method)  # the next time it is found at once
        return call

    def __repr__(self) -> str:
        return f"WorkerGroup({self._cls.__name__}, name={self.name!r}, size={self.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        given = _GivenMembers(self._members.roster(self.name))
        return WorkerGroup, (self._cls, self.name, given, self._selected)

    @property
    def _owner(self) -> Supervisor:
        if isinstance(self._members, _GivenMembers):
            raise UserError(f"only the driver, which launched {self.name}, can change or close it")
        return self._members

    def _check_method(self, method: str) -> bool:
        """Whether it is @concurrent."""
        is_concurrent = self._methods.get(method)
        if is_concurrent is None:
            what = f"method of {self._cls.__name__}"
            raise AttributeError(unknown_name_message(what, method, self._methods))
        return is_concurrent

    def _select(self, members: Sequence[WorkerAddress]) -> Sequence[WorkerAddress]:
        if self._selected is None:
            return members
        by_rank = {address.rank: address for address in members}
        self._check_ranks(self._selected, by_rank)
        return [by_rank[rank] for rank in self._selected]

    def _check_ranks(self, wanted: Collection[int], known: Collection[int]) -> None:
        unknown = [rank for rank in wanted if rank not in known]
        if unknown or not wanted:
            there = ", ".join(map(str, known))
            raise UserError(f"{self.name} has ranks {there}, asked for {unknown or 'none'}")


class _GivenMembers:
    """A group's members in a process that was given the group."""

    def __init__(self, roster: Roster) -> None:
        self._given = roster

    @property
    def context(self) -> RuntimeContext:
        return current()

    def roster(self, group: str) -> Roster:
        """As it was given, or as the hub has told since."""
        return current().directory.newest_roster(group, self._given)

    def ranks(self, group: str) -> tuple[int, ...]:
        return tuple(address.rank for address in self.roster(group).addresses)

    def lost(self, group: str) -> list[int]:
        directory = current().directory
        return [a.rank for a in self.roster(group).addresses if a.identity in directory.dead]
