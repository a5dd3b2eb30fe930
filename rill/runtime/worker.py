"""The base class of everything that runs on devices: one rank of a group, in a process of its own.

A subclass's public methods become the methods of its group (`group.py`). Calls run one at a time, in the order
they were made, on the process's main thread; methods marked `@concurrent` run at once in threads of their own,
for what must work while a long call runs (`abort`, `stats`, `update_weights`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from rill.errors import StuckError
from rill.runtime.context import current
from rill.runtime.device.device import Device
from rill.runtime.transfer.collective import Rendezvous, rendezvous
from rill.telemetry import trace

if TYPE_CHECKING:
    from rill.runtime.channel import Channel
    from rill.runtime.cluster import Cluster
    from rill.runtime.device.placement import Placement
    from rill.runtime.group import WorkerGroup
    from rill.runtime.process.worker_main import WorkerSpec

P = ParamSpec("P")
R = TypeVar("R")

LAUNCH_WAIT_S = 600.0
_CONCURRENT = "__rill_concurrent__"


def concurrent(method: Callable[P, R]) -> Callable[P, R]:
    """Let calls of this method run at once, in a thread of their own, whatever else the worker is doing."""
    method.__dict__[_CONCURRENT] = True
    return method


class Worker:
    """One rank. `rank`, `ranks`, `group_name`, `devices` and `device` are set before `__init__` runs."""

    rank: int
    ranks: tuple[int, ...]
    """The ids of the group's ranks. Ranks that are added or removed change it between two calls, in the order in which
    the driver made calls and changes."""
    group_name: str
    devices: tuple[Device, ...]
    device: str
    """The torch device of this process: "cuda:0" (its first GPU, as it sees it) or "cpu"."""

    @classmethod
    def launch(
        cls,
        cluster: Cluster,
        *,
        name: str | None = None,
        placement: Placement = "all",
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        launch_timeout_s: float | None = LAUNCH_WAIT_S,
        **init_kwargs: Any,
    ) -> WorkerGroup[Self]:
        """Start one process per seat of `placement` and run `__init__(**init_kwargs)` in each.

        `name` defaults to the class's name; `env` is added to each process's environment before anything is
        imported; `threads` bounds OpenMP and torch threads (default: the node's cores shared evenly).
        Returns when every rank is ready (None: at once); raises what the first failing `__init__` raised.
        """
        group = cluster.launch(cls, name or cls.__name__, placement, init_kwargs, env or {}, threads)
        if launch_timeout_s is None:
            return group
        try:
            group.ready(launch_timeout_s)
        except BaseException:
            # An agent that is still importing reads of the kill only then; why the wait ended is what counts.
            with contextlib.suppress(StuckError):
                group.close(timeout_s=0.0)
            raise
        return group

    @classmethod
    def launch_async(cls, cluster: Cluster, **options: Any) -> WorkerGroup[Self]:
        """As `launch`, without waiting: several groups can start side by side. `group.ready()` waits."""
        return cls.launch(cluster, launch_timeout_s=None, **options)

    def onload(self) -> None:
        """Take device memory. Called by the device lock before this worker's turn."""

    def offload(self) -> None:
        """Give device memory back. Called by the device lock after this worker's turn."""

    def close(self) -> None:
        """Called once, on the main thread, when the group is closed in order."""

    def notice(self, notice_s: float) -> None:
        """This rank is being removed and has so long to finish: end loops that would go on. In a thread of its own."""

    def state(self) -> Any:
        """What a move of the group should take along; None: nothing. Asked of every rank."""
        return None

    def restore(self, state: Any) -> None:
        """Take over what `state` gave before a move, after `__init__`. Not called where every rank gave None."""

    @classmethod
    def reshard(cls, states: Sequence[Any], size: int) -> Sequence[Any]:
        """The states for `size` ranks, made from those of the ranks before; runs in the driver. By default ranks get
        them in turn, which is right where every rank holds the same."""
        return [states[n % len(states)] for n in range(size)]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Time a block; the caller reads it from the handle, summed over the call."""
        started_s = time.perf_counter()
        with trace.span(f"{self.group_name}.{name}", lane=f"{self.group_name}[{self.rank}]"):
            try:
                yield
            finally:
                timers = timers_of_call.get({})
                timers[name] = timers.get(name, 0.0) + time.perf_counter() - started_s

    def device_lock(
        self, *channels: Channel, timeout_s: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """This worker's turn on its devices, for work between `channels`, in whatever order they are named.
        `timeout_s`: unless given, an hour, or longer where a wait on one of the channels may last longer."""
        from rill.runtime.device.lock import DeviceLock

        context = current()
        with context.lock:
            lock = context.device_lock = context.device_lock or DeviceLock(self, context)
        return lock.turn(channels, timeout_s)

    def send(
        self, obj: Any, group: str, rank: int, *, tag: str = "", timeout_s: float = LAUNCH_WAIT_S
    ) -> None:
        """Send `obj` to a worker; returns when `obj` may be changed again. Blocks while the peer is behind."""
        current().transfer.send(obj, group, rank, tag=tag, timeout_s=timeout_s)

    def recv(self, group: str, rank: int, *, tag: str = "", timeout_s: float = LAUNCH_WAIT_S) -> Any:
        """The next object that the worker sent here with this tag."""
        return current().transfer.recv(group, rank, tag=tag, timeout_s=timeout_s)

    def broadcast(self, obj: Any = None, *, source: int = 0, timeout_s: float = LAUNCH_WAIT_S) -> Any:
        """Every rank of the group calls it; each gets what rank `source` gave."""
        return current().transfer.broadcast(obj, self.ranks, source=source, timeout_s=timeout_s)

    def rendezvous(self, timeout_s: float = LAUNCH_WAIT_S) -> Rendezvous:
        """How torch.distributed's ranks find each other; every rank of the group calls it. A fresh port each time."""
        return rendezvous(current(), self.ranks, timeout_s=timeout_s)


timers_of_call: ContextVar[dict[str, float]] = ContextVar("rill-timers")
"""Seconds by name, of the call that runs here."""


def build(cls: type[Worker], spec: WorkerSpec, init_kwargs: Mapping[str, Any]) -> Worker:
    """Make a worker that knows its seat before its `__init__` runs."""
    worker = cls.__new__(cls)
    worker.group_name = spec.address.group
    worker.rank = spec.address.rank
    worker.ranks = spec.ranks
    worker.devices = spec.devices
    worker.device = spec.device
    worker.__init__(**init_kwargs)  # type: ignore[misc]
    return worker


_NOT_CALLS = frozenset(name for name in vars(Worker) if not name.startswith("_")) - {"onload", "offload"}
"""`state` and the like are called by the runtime alone."""


_methods: dict[type[Worker], dict[str, bool]] = {}


def callable_methods(cls: type[Worker]) -> dict[str, bool]:
    """The methods that a group of `cls` has, and whether each is `concurrent`: public functions of the class, without
    the tools of Worker itself."""
    if cls not in _methods:
        names = [name for name in dir(cls) if not name.startswith("_") and name not in _NOT_CALLS]
        methods = {name: getattr(cls, name) for name in names}
        _methods[cls] = {name: hasattr(one, _CONCURRENT) for name, one in methods.items() if callable(one)}
    return _methods[cls]
