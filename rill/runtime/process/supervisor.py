"""The driver's groups: starts their processes, knows which run, tells everybody of those that end.

    launch ─▶ agents start processes ─▶ hello of each ─▶ `__init__` on its ranks ─▶ ready
    agents' exit events ─▶ calls that wait for the process fail, the hub and the directory hear of it

`Cluster` owns one and hands it the nodes. Methods are called by user threads; events arrive on the nodes' reader
threads and on the inbox thread. A process carries one rank, or several (`ranks_per_process`), which live and end
together.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rill.errors import PeerDiedError, PlanError, RunError, StuckError, UserError
from rill.runtime.context import DRIVER_GROUP, RuntimeContext, WorkerAddress
from rill.runtime.device.device import Device
from rill.runtime.device.placement import Seat
from rill.runtime.group import ClassRef, Roster
from rill.runtime.handle import Handle
from rill.runtime.hub.membership import LEFT
from rill.runtime.process.agent_client import NodeClient
from rill.runtime.process.call import HostProcess, Lost, encode_arguments
from rill.runtime.process.launcher import Launcher
from rill.runtime.process.mailbox import Frames
from rill.runtime.process.rank import INIT
from rill.runtime.process.report import explain
from rill.runtime.process.worker_main import HELLO
from rill.runtime.transfer.parcel import pack_inline

KILL_WAIT_S = 10.0
HELLO_WAIT_S = 600.0
"""From a process's start to its hello, before anything of the user's is imported: long only where a node is overloaded.
"""
REPORT_FROM_S = 10.0
"""Shorter deadlines are polls, and not worth asking every process what it is doing."""


@dataclass(slots=True)
class _Process:
    """A process of a group: its seats, and whether it runs."""

    seats: tuple[Seat, ...]
    incarnation: int
    ready: Handle
    """Of `__init__`; replaced by a relaunch."""
    host: HostProcess | None = None
    """Where it is, once it has said hello."""
    is_running: bool = False
    is_lost: bool = False
    """It ended before its hello."""

    @property
    def node_id(self) -> str:
        return self.seats[0].node_id


@dataclass(slots=True)
class _Group:
    """What is needed to start a group's processes, now and again."""

    name: str
    processes: list[_Process]
    world_size: int
    env: Mapping[str, str]
    threads: int | None
    peers: Sequence[Device]
    init_payload: Frames
    roster: Roster | None = None
    is_closing: bool = False
    is_asked_to_stop: bool = False
    by_rank: dict[int, _Process] = field(default_factory=dict)

    def address(self, seat: Seat, incarnation: int) -> WorkerAddress:
        """Who a rank is, before its process has said where."""
        return WorkerAddress(self.name, seat.rank, seat.node_id, 0, "", incarnation=incarnation)

    def identities(self, process: _Process) -> list[str]:
        """Of the process's ranks; the first is the process's own."""
        return [self.address(seat, process.incarnation).identity for seat in process.seats]


class Supervisor:
    """The groups of one cluster. Thread-safe."""

    def __init__(
        self,
        context: RuntimeContext,
        launcher: Launcher,
        find_node: Callable[[str], NodeClient],
    ) -> None:
        self._context = context
        self._launcher = launcher
        self._find_node = find_node
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._groups: dict[str, _Group] = {}
        self._by_key: dict[str, tuple[_Group, _Process]] = {}
        """Every process that was started, by its identity, which is its key at the agents."""
        self._next_incarnation: dict[str, int] = {}
        self._is_closed = False
        context.mailbox.on(HELLO, self._on_hello)

    @property
    def context(self) -> RuntimeContext:
        """The driver's own doors."""
        return self._context

    # --- groups -------------------------------------------------------------------------------------------

    def launch(
        self,
        ref: ClassRef,
        name: str,
        seats: Sequence[tuple[Seat, ...]],
        *,
        env: Mapping[str, str],
        threads: int | None,
        peers: Sequence[Device],
        init_kwargs: Mapping[str, Any],
    ) -> int:
        """Start a group with one process for each entry of `seats`; gives the number of its ranks. `peers`: devices
        that its processes see beside their own, as far as they are on their node."""
        payload = pack_inline(encode_arguments((ref,), init_kwargs))
        world_size = sum(map(len, seats))
        with self._lock:
            self._check_name(name)
            group = _Group(name, [], world_size, env, threads, peers, payload)
            first = self._next_incarnation.get(name, 0)  # a name may be used again, an identity may not
            for held in seats:
                process = _Process(held, first, self._ready_handle(group, held, first))
                group.processes.append(process)
                group.by_rank.update((seat.rank, process) for seat in held)
            self._groups[name] = group
        for process in group.processes:
            self._start(group, process)
        return world_size

    def roster(self, name: str) -> Roster:
        """The processes of a group, once all have said hello: calls may be made before `__init__` has run, and wait for
        it there. Part of `GroupOwner`."""
        group = self._group(name)
        if group.roster is not None:
            return group.roster
        with self._changed:
            processes = group.processes
            if not self._changed.wait_for(
                lambda: all(process.host is not None or process.is_lost for process in processes),
                HELLO_WAIT_S,
            ):
                silent = [group.identities(process)[0] for process in processes if process.host is None]
                raise StuckError(f"{', '.join(silent)} did not start within {HELLO_WAIT_S:g} s")
            lost = [process.ready for process in processes if process.is_lost]
            if not lost:
                hosts = [process.host for process in processes if process.host is not None]
                group.roster = Roster.of(hosts)
                return group.roster
        lost[0].wait(KILL_WAIT_S)
        raise AssertionError("a process that ended before its hello was ready")

    def wait_ready(self, name: str, timeout_s: float) -> None:
        """Wait for every `__init__`; a failure ends the group's other processes too."""
        group = self._group(name)
        deadline_s = time.monotonic() + timeout_s
        try:
            for process in group.processes:
                process.ready.wait(max(0.0, deadline_s - time.monotonic()))
        except (RunError, KeyboardInterrupt):
            # An agent that is still importing reads of the kill only then; why the wait ended is what counts.
            with contextlib.suppress(StuckError):
                self.close_group(name, 0.0)
            raise

    def relaunch(self, name: str, rank: int, timeout_s: float) -> None:
        """Part of `GroupOwner`; see WorkerGroup.relaunch."""
        group = self._group(name)
        process = group.by_rank[rank]
        self._end(group, process)
        with self._lock:
            process.incarnation += 1
            process.host = group.roster = None
            process.is_lost = False
            process.ready = self._ready_handle(group, process.seats, process.incarnation)
        self._start(group, process)
        process.ready.wait(timeout_s)

    def close_group(self, name: str, timeout_s: float) -> None:
        """Part of `GroupOwner`; see WorkerGroup.close."""
        with self._lock:
            group = self._groups.pop(name, None)
            if group is None:
                return
            group.is_closing = True
            running = [process for process in group.processes if process.is_running]
        if timeout_s > 0:
            self._ask_to_stop(group)
        self._wait_ended(running, timeout_s)
        for process in running:
            self._end(group, process)
        self._next_incarnation[name] = 1 + max(process.incarnation for process in group.processes)

    def close(self, timeout_s: float) -> None:
        """Close every group; what is still busy then is left to the agents."""
        with self._lock:
            self._is_closed = True
            groups = list(self._groups.values())
        for group in groups:
            self._ask_to_stop(group)
        deadline_s = time.monotonic() + timeout_s
        for group in groups:
            with contextlib.suppress(StuckError):
                self.close_group(group.name, max(0.01, deadline_s - time.monotonic()))

    def diagnose(self, message: str, timeout_s: float) -> StuckError:
        """A passed deadline as an error; a long one comes with the report of who waits for whom."""
        return StuckError(explain(self._context, message) if timeout_s >= REPORT_FROM_S else message)

    # --- starting and ending processes --------------------------------------------------------------------

    def _ready_handle(self, group: _Group, seats: Sequence[Seat], incarnation: int) -> Handle:
        targets = [group.address(seat, incarnation) for seat in seats]
        return Handle(f"{group.name}.{INIT}", targets, self._context.calls.pump, self.diagnose)

    def _start(self, group: _Group, process: _Process) -> None:
        node = self._find_node(process.node_id)
        num_on_node = sum(1 for other in group.processes if other.node_id == process.node_id)
        key = group.identities(process)[0]
        with self._lock:
            process.is_running = True
            self._by_key[key] = (group, process)
        request = self._launcher.worker(
            node,
            key,
            process.seats,
            group=group.name,
            world_size=group.world_size,
            incarnation=process.incarnation,
            num_threads=group.threads or max(1, node.node.num_cores // num_on_node),
            peers=[device for device in group.peers if device.node_id == process.node_id],
            env=group.env,
        )
        node.start(request)

    def _ask_to_stop(self, group: _Group) -> None:
        """Once: a worker that has read it stops after the calls before it."""
        with self._lock:
            group.is_closing = True
            hosts = [process.host for process in group.processes if process.is_running]
            was_asked, group.is_asked_to_stop = group.is_asked_to_stop, True
        for host in hosts if not was_asked else ():
            if host is not None:
                self._context.calls.stop(host)

    def _end(self, group: _Group, process: _Process) -> None:
        """Kill a process if it runs, and wait until the agent says so."""
        with self._lock:
            if not process.is_running:
                return
        key = group.identities(process)[0]
        self._find_node(process.node_id).kill(key, signal.SIGKILL)
        if not self._wait_ended([process], KILL_WAIT_S):
            raise StuckError(f"{key} did not end within {KILL_WAIT_S:g} s of its kill")

    def _wait_ended(self, processes: Sequence[_Process], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(p.is_running for p in processes), timeout_s)

    # --- events -------------------------------------------------------------------------------------------

    def process_ended(self, key: str, reason: str) -> None:
        """The agent of its node says so. Keys of processes that are no group's are none of our business."""
        with self._lock:
            if key not in self._by_key:
                return
            group, process = self._by_key[key]
            identities = group.identities(process)
            if identities[0] != key or not process.is_running:
                return
            process.is_running = False
            host, ready = process.host, process.ready
            process.is_lost = host is None
            was_asked_for = group.is_closing
            self._changed.notify_all()
        self._forget(host)
        told = "its group was closed" if was_asked_for else reason
        for identity in identities:
            self._context.directory.report_death(identity, told)
        # A process that ends in order says so to the hub itself, but for ranks that never had a line to it.
        with contextlib.suppress(
            RunError
        ):  # no hub any more: who waits here must hear of the death all the same
            for identity in identities[1:] if was_asked_for else identities:
                self._context.hub.submit("registry.died", [identity, LEFT if was_asked_for else reason])
        if host is None:
            ready.fill(
                [
                    (n, Lost(PeerDiedError(f"{target.name} died before it was ready: {reason}")))
                    for n, target in enumerate(ready.targets)
                ]
            )

    def node_lost(self, node_id: str, reason: str) -> None:
        """All processes of a node are gone with its agent."""
        with self._lock:
            lost = [
                key
                for key, (group, process) in self._by_key.items()
                if process.node_id == node_id and group.identities(process)[0] == key
            ]
        for key in lost:
            self.process_ended(key, reason)

    def _on_hello(self, frames: Frames) -> None:
        host = pickle.loads(frames[0])
        assert isinstance(host, HostProcess)
        with self._lock:
            group, process = self._by_key[host.identity]
            process.host = host
            # Under the lock: whoever calls the group from now on comes after its `__init__`.
            ranks = range(len(host.addresses))
            self._context.calls.call(host, INIT, group.init_payload, process.ready, ranks)
            self._changed.notify_all()

    def _forget(self, host: HostProcess | None) -> None:
        if host is not None:
            address, mailbox = host.addresses[0], self._context.mailbox
            mailbox.forget(address.endpoint_from(self._context.node_id))
            for endpoint in (host.work_tcp_endpoint, address.raw_endpoint):
                if endpoint:
                    mailbox.forget(endpoint)

    # --- checks -------------------------------------------------------------------------------------------

    def _group(self, name: str) -> _Group:
        with self._lock:
            if self._is_closed:
                raise RunError("the cluster is closed")
            if name not in self._groups:
                raise RunError(f"the group {name!r} is closed")
            return self._groups[name]

    def _check_name(self, name: str) -> None:
        if not name or not all(c.isalnum() or c in "-_." for c in name) or name == DRIVER_GROUP:
            raise UserError(
                f"{name!r} cannot name a group: use letters, digits, '-', '_' and '.', not 'driver'"
            )
        if self._is_closed:
            raise RunError("the cluster is closed: no group can be launched on it")
        if name in self._groups:
            raise PlanError(f"there is a group {name!r} already: close it first or choose another name")


def describe_exit(exit_code: int, log_tail: str) -> str:
    """How a process ended, in words, with the end of what it printed."""
    if exit_code < 0:
        how = f"killed by {signal.Signals(-exit_code).name}"
    else:
        how = f"exit code {exit_code}"
    return f"{how}\n--- end of its log ---\n{log_tail}" if log_tail else how
