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
from rill.runtime.call import encode_arguments
from rill.runtime.context import RuntimeContext, WorkerAddress, current
from rill.runtime.handle import DEFAULT_WAIT_S, Handle
from rill.runtime.worker import Worker, callable_methods, is_concurrent

W = TypeVar("W", bound=Worker)


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
class Member:
    """One rank of a group, as callers see it."""

    address: WorkerAddress
    work_endpoint: str
    work_tcp_endpoint: str

    def endpoint_for(self, node_id: str, *, concurrent: bool) -> str:
        """Where a process on `node_id` sends a call."""
        if concurrent:
            return self.address.endpoint_from(node_id)
        return self.work_endpoint if node_id == self.address.node_id else self.work_tcp_endpoint


class GroupOwner(Protocol):
    """What a group needs from the cluster that launched it."""

    @property
    def context(self) -> RuntimeContext: ...
    def members(self, group: str) -> Sequence[Member]: ...
    def wait_ready(self, group: str, timeout_s: float) -> None: ...
    def relaunch(self, group: str, rank: int, timeout_s: float) -> None: ...
    def close_group(self, group: str, timeout_s: float) -> None: ...
    def diagnose(self, message: str, timeout_s: float) -> StuckError: ...


class WorkerGroup(Generic[W]):
    """The driver's view of a group."""

    def __init__(self, cls: type[W], name: str, size: int, owner: GroupOwner) -> None:
        self.name = name
        self.size = size
        self._cls = cls
        self._owner = owner
        self._methods = {method: getattr(cls, method) for method in callable_methods(cls)}

    def on(self, *ranks: int) -> Selection[W]:
        """Some of the ranks, for calls to them alone."""
        unknown = [rank for rank in ranks if not 0 <= rank < self.size]
        if unknown or not ranks:
            raise UserError(f"{self.name} has ranks 0 to {self.size - 1}, asked for {unknown or 'none'}")
        return Selection(self, ranks)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Handle:
        """Call by name; `group.method(...)` is the same."""
        return self._call(method, range(self.size), args, kwargs)

    def ready(self, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until every rank's `__init__` has run; raises what the first failing one raised."""
        self._owner.wait_ready(self.name, timeout_s)

    def relaunch(self, rank: int, *, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Start a rank again, in a new process, with the arguments of its launch. A live one is ended first."""
        self.on(rank)
        self._owner.relaunch(self.name, rank, timeout_s)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """End the workers: those idle run their `close`, those busy past the time are killed. Safe to call twice."""
        self._owner.close_group(self.name, timeout_s)

    def addresses(self) -> list[WorkerAddress]:
        """Where the ranks are now."""
        return [member.address for member in self._owner.members(self.name)]

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        if method.startswith("_"):
            raise AttributeError(method)
        self._check_method(method)
        return lambda *args, **kwargs: self._call(method, range(self.size), args, kwargs)

    def __repr__(self) -> str:
        return f"WorkerGroup({self._cls.__name__}, name={self.name!r}, size={self.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        members = tuple(self._owner.members(self.name))
        return (_rebuild_group, (ClassRef.of(self._cls), self.name, self.size, members))

    def _call(
        self, method: str, ranks: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        self._check_method(method)
        members = self._owner.members(self.name)
        context = self._owner.context
        handle = Handle(f"{self.name}.{method}", [members[rank].address for rank in ranks])
        handle.explain_with(self._owner.diagnose)
        payload = context.parcels.pack(encode_arguments(args, kwargs), handle.targets)
        at_once = is_concurrent(self._methods[method])
        for index, rank in enumerate(ranks):
            member = members[rank]
            endpoint = member.endpoint_for(context.node_id, concurrent=at_once)
            context.calls.call(member.address, endpoint, method, payload, handle, index)
        return handle

    def _check_method(self, method: str) -> None:
        if method not in self._methods:
            raise AttributeError(
                unknown_name_message(f"method of {self._cls.__name__}", method, list(self._methods))
            )


class Selection(Generic[W]):
    """Some ranks of a group."""

    def __init__(self, group: WorkerGroup[W], ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = tuple(ranks)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Handle:
        return self._group._call(method, self._ranks, args, kwargs)

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        if method.startswith("_"):
            raise AttributeError(method)
        self._group._check_method(method)
        return lambda *args, **kwargs: self._group._call(method, self._ranks, args, kwargs)


class _RemoteOwner:
    """Stands for the cluster in a process that was given a group."""

    def __init__(self, members: tuple[Member, ...]) -> None:
        self._members = list(members)

    @property
    def context(self) -> RuntimeContext:
        return current()

    def members(self, group: str) -> Sequence[Member]:
        return self._members

    def wait_ready(self, group: str, timeout_s: float) -> None:
        """A group can only be passed on once it is ready."""

    def relaunch(self, group: str, rank: int, timeout_s: float) -> None:
        raise UserError(f"only the driver, which launched {group}, can relaunch its ranks")

    def close_group(self, group: str, timeout_s: float) -> None:
        raise UserError(f"only the driver, which launched {group}, can close it")

    def diagnose(self, message: str, timeout_s: float) -> StuckError:
        return StuckError(message)


def _rebuild_group(ref: ClassRef, name: str, size: int, members: tuple[Member, ...]) -> WorkerGroup[Any]:
    return WorkerGroup(ref.load(), name, size, _RemoteOwner(members))
