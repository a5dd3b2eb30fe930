"""A group of workers of one class, called as one: every public method of the class is a method of the group.

    handle = group.generate(prompts, rollouts)     # on every rank, returns at once
    handle = group.on(0, 2).stats()                # on ranks 0 and 2
    results = handle.wait(timeout_s=60)

A group may be passed to other workers as an argument; they call it directly, without the driver.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rill.errors import StuckError, UserError
from rill.registry import unknown_name_message
from rill.runtime.context import RuntimeContext, WorkerAddress, current
from rill.runtime.handle import DEFAULT_WAIT_S, Handle
from rill.runtime.process.call import HostProcess, encode_arguments
from rill.runtime.worker import Worker, callable_methods, is_concurrent

W_co = TypeVar("W_co", bound=Worker, covariant=True)


@dataclass(frozen=True, slots=True)
class ClassRef:
    """A class by name: nothing is imported until `load`, in the process that needs it."""

    module: str
    qualname: str

    @staticmethod
    def of(cls: type[Any]) -> ClassRef:
        if "<locals>" in cls.__qualname__:
            raise UserError(
                f"{cls.__qualname__} is defined inside a function: move it to the top level of a module"
            )
        return ClassRef(cls.__module__, cls.__qualname__)

    def load(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, slots=True)
class Roster:
    """The processes of a group and its ranks, as they are now."""

    hosts: tuple[HostProcess, ...]
    addresses: tuple[WorkerAddress, ...]
    """By rank."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each process."""
    places: tuple[tuple[int, int], ...]
    """By rank: the number of its process and its position there."""

    @staticmethod
    def of(hosts: Sequence[HostProcess]) -> Roster:
        ranks = tuple(tuple(address.rank for address in host.addresses) for host in hosts)
        places = {rank: (n, k) for n, held in enumerate(ranks) for k, rank in enumerate(held)}
        addresses = sorted((a for host in hosts for a in host.addresses), key=lambda address: address.rank)
        return Roster(tuple(hosts), tuple(addresses), ranks, tuple(places[rank] for rank in sorted(places)))

    def renewed(self, found: Sequence[HostProcess]) -> Roster:
        """With the processes that have come in the place of others of the same ranks."""
        newer = {host.addresses[0].rank: host for host in found}
        return Roster.of([newer.get(host.addresses[0].rank, host) for host in self.hosts])

    def parts(self, chosen: Sequence[int]) -> list[tuple[HostProcess, list[int], list[int]]]:
        """For each process of `chosen` ranks: itself, the ranks' positions in it, and their places in `chosen`."""
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for index, rank in enumerate(chosen):
            number, position = self.places[rank]
            positions, indices = parts.setdefault(number, ([], []))
            positions.append(position)
            indices.append(index)
        return [(self.hosts[number], *part) for number, part in parts.items()]


class GroupOwner(Protocol):
    """What a group needs from the cluster that launched it."""

    @property
    def context(self) -> RuntimeContext: ...
    def roster(self, group: str) -> Roster: ...
    def wait_ready(self, group: str, timeout_s: float) -> None: ...
    def relaunch(self, group: str, rank: int, timeout_s: float) -> None: ...
    def close_group(self, group: str, timeout_s: float) -> None: ...
    def diagnose(self, message: str, timeout_s: float) -> StuckError: ...


class WorkerGroup(Generic[W_co]):
    """The driver's view of a group."""

    def __init__(self, cls: type[W_co], name: str, size: int, owner: GroupOwner) -> None:
        self.name = name
        self.size = size
        self._cls = cls
        self._owner = owner
        self._all = tuple(range(size))
        self._methods = {method: getattr(cls, method) for method in callable_methods(cls)}

    def on(self, *ranks: int) -> Selection[W_co]:
        """Some of the ranks, for calls to them alone."""
        unknown = [rank for rank in ranks if not 0 <= rank < self.size]
        if unknown or not ranks:
            raise UserError(f"{self.name} has ranks 0 to {self.size - 1}, asked for {unknown or 'none'}")
        return Selection(self, None if ranks == self._all else ranks)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Handle:
        """Call by name; `group.method(...)` is the same."""
        return self._call(method, None, args, kwargs)

    def ready(self, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until every rank's `__init__` has run; raises what the first failing one raised."""
        self._owner.wait_ready(self.name, timeout_s)

    def relaunch(self, rank: int, *, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Start a rank again, in a new process, with the arguments of its launch. A live one is ended first.

        Ranks that share its process (`ranks_per_process`) end and start with it.
        """
        self.on(rank)
        self._owner.relaunch(self.name, rank, timeout_s)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """End the workers: those idle run their `close`, those busy past the time are killed. Safe to call twice."""
        self._owner.close_group(self.name, timeout_s)

    def addresses(self) -> list[WorkerAddress]:
        """Where the ranks are now."""
        return list(self._owner.roster(self.name).addresses)

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        if method.startswith("_"):
            raise AttributeError(method)
        self._check_method(method)
        return lambda *args, **kwargs: self._call(method, None, args, kwargs)

    def __repr__(self) -> str:
        return f"WorkerGroup({self._cls.__name__}, name={self.name!r}, size={self.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_group, (ClassRef.of(self._cls), self.name, self.size, self._owner.roster(self.name)))

    def _call(
        self, method: str, ranks: Sequence[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        """One message per process, whatever the number of ranks in it. `ranks`: None for all."""
        self._check_method(method)
        roster = self._owner.roster(self.name)
        context = self._owner.context
        at_once = is_concurrent(self._methods[method])
        encoded = encode_arguments(args, kwargs)
        if ranks is None:
            handle = Handle(
                f"{self.name}.{method}", roster.addresses, context.calls.pump, self._owner.diagnose
            )
            payload = context.parcels.pack(encoded, roster.hosts)
            for host, held in zip(roster.hosts, roster.ranks, strict=True):
                context.calls.call(host, method, payload, handle, held, concurrent=at_once)
            return handle
        parts = roster.parts(ranks)
        targets = [roster.addresses[rank] for rank in ranks]
        handle = Handle(f"{self.name}.{method}", targets, context.calls.pump, self._owner.diagnose)
        payload = context.parcels.pack(encoded, [host for host, _, _ in parts])
        for host, positions, indices in parts:
            context.calls.call(
                host, method, payload, handle, indices, positions=positions, concurrent=at_once
            )
        return handle

    def _check_method(self, method: str) -> None:
        if method not in self._methods:
            raise AttributeError(
                unknown_name_message(f"method of {self._cls.__name__}", method, list(self._methods))
            )


class Selection(Generic[W_co]):
    """Some ranks of a group."""

    def __init__(self, group: WorkerGroup[W_co], ranks: tuple[int, ...] | None) -> None:
        """`ranks`: None for all, which needs no sorting out."""
        self._group = group
        self._ranks = ranks

    def call(self, method: str, *args: Any, **kwargs: Any) -> Handle:
        return self._group._call(method, self._ranks, args, kwargs)

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        if method.startswith("_"):
            raise AttributeError(method)
        self._group._check_method(method)
        return lambda *args, **kwargs: self._group._call(method, self._ranks, args, kwargs)


class _RemoteOwner:
    """Stands for the cluster in a process that was given a group."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    @property
    def context(self) -> RuntimeContext:
        return current()

    def roster(self, group: str) -> Roster:
        """As it was given, but for processes that have died since and were started again."""
        directory = current().directory
        if any(directory.is_dead(host.identity) for host in self._roster.hosts):
            self._roster = self._roster.renewed(directory.processes(group))
        return self._roster

    def wait_ready(self, group: str, timeout_s: float) -> None:
        """A group can only be passed on once it is ready."""

    def relaunch(self, group: str, rank: int, timeout_s: float) -> None:
        raise UserError(f"only the driver, which launched {group}, can relaunch its ranks")

    def close_group(self, group: str, timeout_s: float) -> None:
        raise UserError(f"only the driver, which launched {group}, can close it")

    def diagnose(self, message: str, timeout_s: float) -> StuckError:
        return StuckError(message)


def _rebuild_group(ref: ClassRef, name: str, size: int, roster: Roster) -> WorkerGroup[Any]:
    return WorkerGroup(ref.load(), name, size, _RemoteOwner(roster))
