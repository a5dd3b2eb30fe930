"""Where a run's processes live: nodes, devices with global ids, and the groups of workers placed on them.

    with Cluster(devices=4) as cluster:               # this machine: child processes, no daemon
    with Cluster.ray("auto", devices=4) as cluster:   # Ray finds the nodes and starts an agent on each

    driver ── Cluster ──▶ node agent (one per node) ──▶ hub (first node), workers
        └──────── calls (mailbox) ───────────────────────────▶┘

Leaving the `with` block, the driver's exit and the driver's death all end every process and remove every file of the
session. A worker's death fails the calls that wait for it and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rill.errors import PeerDiedError, PlanError, RunError, StuckError, UserError
from rill.runtime import context as runtime_context
from rill.runtime.backend import Backend, LocalBackend
from rill.runtime.call import CallBook, encode_arguments
from rill.runtime.context import DRIVER_GROUP, RuntimeContext, WorkerAddress
from rill.runtime.device import Device, Node, number
from rill.runtime.group import ClassRef, Member, WorkerGroup
from rill.runtime.handle import Handle
from rill.runtime.host import HELLO, INIT, STOP, Hello
from rill.runtime.launcher import Launcher
from rill.runtime.local import NodeClient
from rill.runtime.mailbox import Frames, Mailbox
from rill.runtime.parcel import pack_inline
from rill.runtime.placement import Placement, Seat, resolve
from rill.runtime.process import Event, Exited, allow_many_files
from rill.runtime.report import explain
from rill.runtime.session import open_session
from rill.runtime.session_key import SessionKey
from rill.runtime.transfer import free_port
from rill.runtime.worker import Worker

W = TypeVar("W", bound=Worker)

KILL_WAIT_S = 10.0
HUB_WAIT_S = 30.0
CLOSE_WAIT_S = 2.0
"""What all groups together are given to end in order when the cluster closes."""
REPORT_FROM_S = 10.0
"""Shorter deadlines are polls, and not worth asking every process what it is doing."""


@dataclass(slots=True)
class _Rank:
    """One seat of a group and the process on it."""

    seat: Seat
    placeholder: WorkerAddress
    incarnation: int = 0
    member: Member | None = None
    is_running: bool = False
    death: str | None = None
    """Why its last process ended, unless that was asked for."""


@dataclass(slots=True)
class _Group:
    """What is needed to start a group's processes, now and again."""

    name: str
    ranks: list[_Rank]
    env: Mapping[str, str]
    threads: int | None
    init_payload: Frames
    ready: dict[int, Handle] = field(default_factory=dict)
    """The handle of `__init__` and its slot, by rank; replaced by a relaunch."""
    is_closing: bool = False
    is_asked_to_stop: bool = False


class Cluster:
    """The nodes, devices and groups of one run, seen from the driver."""

    def __init__(
        self,
        devices: str | int | Sequence[Device] = "auto",
        *,
        labels: Sequence[str] = (),
        preload: Sequence[str] = (),
        trace_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`devices`: "auto", a number, "cpu:4", "cuda:2,cpu:4", or a list of Device. `preload`: modules that workers
        find imported, e.g. "torch": it then costs its time and memory once (only for modules that stand a fork).
        `trace_dir`: where workers write their trace. `log_dir`: keep the workers' output there, else it is removed
        with the session."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._groups: dict[str, _Group] = {}
        self._keys: dict[str, tuple[_Group, int]] = {}
        self._next_incarnation: dict[str, int] = {}
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._backend = backend or LocalBackend(devices, frozenset(labels))
        self.session = open_session()
        self._log_dir = Path(log_dir) if log_dir is not None else self.session.session_dir / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        allow_many_files()
        try:
            opened = self._backend.open(
                self.session, tuple(preload), on_event=self._on_event, on_lost=self._on_node_lost
            )
        except BaseException:
            self._backend.close()
            self.session.close()
            raise
        self._nodes: dict[str, NodeClient] = {client.node.node_id: client for client in opened.nodes}
        self.devices: tuple[Device, ...] = number(opened.devices)
        first = opened.nodes[0].node
        is_spread = len(self._nodes) > 1
        hub_tcp = f"tcp://{first.host}:{free_port(first.host)}" if is_spread else ""
        self._context = self._make_context(first)
        self._launcher = Launcher(
            self.context,
            hub_tcp=hub_tcp,
            log_dir=self._log_dir,
            trace_dir=str(trace_dir) if trace_dir is not None else None,
        )
        self._start_services()
        self.context.open()
        self.context.mailbox.start()
        self.context.directory.publish(self.context.address, 1)
        runtime_context.install(self.context)
        self._at_exit = functools.partial(_close_at_exit, weakref.WeakMethod(self.close))
        atexit.register(self._at_exit)

    @classmethod
    def ray(
        cls, address: str = "local", devices: str | int | Sequence[Device] = "auto", **options: Any
    ) -> Cluster:
        """On Ray: "local" starts a cluster here, "auto" joins the one at hand, else its address. `devices` counts per
        node. `options` are those of Cluster."""
        from rill.runtime.ray import RayBackend

        return cls(backend=RayBackend(address, devices), **options)

    @property
    def context(self) -> RuntimeContext:
        """The driver's own doors in this cluster."""
        return self._context

    @property
    def nodes(self) -> list[Node]:
        """The machines, the driver's first."""
        return [client.node for client in self._nodes.values()]

    def coreside(self, *groups: str) -> None:
        """Say that these groups fit on the devices they share: they keep their memory there and need no turns."""
        self.context.hub.call("locks", "coreside", list(groups), HUB_WAIT_S)

    # --- groups -------------------------------------------------------------------------------------------

    def launch(
        self,
        cls: type[W],
        *,
        name: str,
        placement: Placement = "all",
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> WorkerGroup[W]:
        """Start a group's processes; `Worker.launch` is the usual way here, and waits until they are ready."""
        self._check_name(name)
        ref = ClassRef.of(cls)
        seats = resolve(placement, self.devices)
        payload = pack_inline(encode_arguments((ref,), init_kwargs or {}))
        first = self._next_incarnation.get(name, 0)  # a name may be used again, an identity may not
        ranks = [
            _Rank(seat, WorkerAddress(name, seat.rank, seat.node_id, 0, "", incarnation=first), first)
            for seat in seats
        ]
        group = _Group(name, ranks, dict(env or {}), threads, payload)
        with self._lock:
            self._groups[name] = group
        for rank in range(len(ranks)):
            self._start_rank(group, rank)
        return WorkerGroup(cls, name, len(ranks), self)

    def members(self, group: str) -> Sequence[Member]:
        """The processes of a group that is ready; part of `GroupOwner`."""
        state = self._group(group)
        members = [rank.member for rank in state.ranks]
        if None in members:
            self.wait_ready(group, KILL_WAIT_S)
            members = [rank.member for rank in state.ranks]
        return members  # type: ignore[return-value]

    def wait_ready(self, group: str, timeout_s: float) -> None:
        """Wait for every `__init__`; a failure ends the group's other processes too."""
        state = self._group(group)
        deadline_s = time.monotonic() + timeout_s
        try:
            for handle in list(state.ready.values()):
                handle.wait(max(0.0, deadline_s - time.monotonic()))
        except (RunError, KeyboardInterrupt):
            self.close_group(group, 0.0)
            raise

    def relaunch(self, group: str, rank: int, timeout_s: float) -> None:
        """Part of `GroupOwner`; see WorkerGroup.relaunch."""
        state = self._group(group)
        entry = state.ranks[rank]
        self._end_rank(state, rank)
        with self._lock:
            entry.incarnation += 1
            entry.member = None
            entry.death = None
            old = entry.placeholder
            entry.placeholder = WorkerAddress(
                old.group, old.rank, old.node_id, 0, "", incarnation=entry.incarnation
            )
        self._start_rank(state, rank)
        state.ready[rank].wait(timeout_s)

    def close_group(self, group: str, timeout_s: float) -> None:
        """Part of `GroupOwner`; see WorkerGroup.close."""
        with self._lock:
            state = self._groups.pop(group, None)
            if state is None:
                return
            state.is_closing = True
            running = [n for n, rank in enumerate(state.ranks) if rank.is_running]
        if timeout_s > 0:
            self._ask_to_stop(state)
        self._wait_ended([state.ranks[n] for n in running], timeout_s)
        for n in running:
            self._end_rank(state, n)
        self._next_incarnation[group] = 1 + max(rank.incarnation for rank in state.ranks)

    def diagnose(self, message: str, timeout_s: float) -> StuckError:
        """A passed deadline as an error; a long one comes with the report of who waits for whom."""
        return StuckError(explain(self.context, message) if timeout_s >= REPORT_FROM_S else message)

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process and remove every file of the session. Safe to call twice."""
        with self._lock:
            if self._is_closed or os.getpid() != self._owner_pid:  # a fork of the driver owns nothing
                return
            self._is_closed = True
            groups = dict(self._groups)
        atexit.unregister(self._at_exit)
        for group in groups.values():
            self._ask_to_stop(group)
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        for name in groups:
            with contextlib.suppress(StuckError):  # the agents kill what is left
                self.close_group(name, max(0.01, deadline_s - time.monotonic()))
        runtime_context.uninstall(self.context)
        self.context.close()
        self.context.mailbox.close()
        for node in self._nodes.values():
            node.close()
        self._backend.close()
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- starting and ending processes --------------------------------------------------------------------

    def _make_context(self, node: Node) -> RuntimeContext:
        session_dir = self.session.session_dir
        is_spread = len(self._nodes) > 1
        key = SessionKey.new() if is_spread else None
        if key is not None:
            key.save(session_dir)  # for the hub
        mailbox = Mailbox(f"ipc://{session_dir}/driver", tcp_host=node.host if is_spread else None, key=key)
        address = WorkerAddress(
            DRIVER_GROUP,
            0,
            node.node_id,
            os.getpid(),
            mailbox.endpoint,
            mailbox.tcp_endpoint,
            mailbox.raw_endpoint,
        )
        mailbox.on(HELLO, self._on_hello)
        return RuntimeContext(
            session_id=self.session.session_id,
            session_dir=session_dir,
            shm_dir=self.session.shm_dir,
            node_id=node.node_id,
            address=address,
            hub_endpoint=f"ipc://{session_dir}/hub.sock",
            mailbox=mailbox,
            calls=CallBook(mailbox, address),
            host=node.host,
            num_nodes=len(self._nodes),
            key=key,
        )

    def _start_services(self) -> None:
        """The hub here, and where there are several nodes a store server on each."""
        self._nodes[self.context.node_id].start(self._launcher.hub())
        for client in self._nodes.values() if len(self._nodes) > 1 else ():
            client.start(self._launcher.store_server(client))

    def _start_rank(self, group: _Group, n: int) -> None:
        rank = group.ranks[n]
        key = rank.placeholder.identity
        node = self._node(rank.seat.node_id)
        seats_on_node = sum(1 for other in group.ranks if other.seat.node_id == rank.seat.node_id)
        num_threads = group.threads or max(1, node.node.num_cores // seats_on_node)
        handle = Handle(f"{group.name}.__init__", [rank.placeholder])
        handle.explain_with(self.diagnose)
        with self._lock:
            group.ready[n] = handle
            rank.is_running = True
            self._keys[key] = (group, n)
        request = self._launcher.worker(
            node,
            key,
            rank.seat,
            group=group.name,
            world_size=len(group.ranks),
            incarnation=rank.incarnation,
            num_threads=num_threads,
            env=group.env,
        )
        node.start(request)

    def _ask_to_stop(self, group: _Group) -> None:
        """Once: a worker that has read it stops after the calls before it."""
        with self._lock:
            group.is_closing = True
            members = [rank.member for rank in group.ranks if rank.is_running and rank.member is not None]
            was_asked, group.is_asked_to_stop = group.is_asked_to_stop, True
        for member in members if not was_asked else ():
            endpoint = member.endpoint_for(self.context.node_id, concurrent=False)
            self.context.mailbox.post(endpoint, [STOP])

    def _end_rank(self, group: _Group, n: int) -> None:
        """Kill a rank's process if it runs, and wait until the agent says so."""
        rank = group.ranks[n]
        with self._lock:
            if not rank.is_running:
                return
        self._node(rank.seat.node_id).kill(rank.placeholder.identity, signal.SIGKILL)
        if not self._wait_ended([rank], KILL_WAIT_S):
            raise StuckError(f"{rank.placeholder.name} did not end within {KILL_WAIT_S:g} s of its kill")

    def _wait_ended(self, ranks: Sequence[_Rank], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(rank.is_running for rank in ranks), timeout_s)

    # --- events: on the nodes' reader threads and on the inbox thread ----------------------------------------

    def _on_hello(self, frames: Frames) -> None:
        hello = pickle.loads(frames[0])
        assert isinstance(hello, Hello)
        with self._lock:
            group, n = self._keys[hello.address.identity]
            rank = group.ranks[n]
            rank.member = Member(hello.address, hello.work_endpoint, hello.work_tcp_endpoint)
            member, handle = rank.member, group.ready[n]
        endpoint = member.endpoint_for(self.context.node_id, concurrent=False)
        self.context.calls.call(member.address, endpoint, INIT, group.init_payload, handle, 0)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Exited) and event.key in self._keys:
            self._rank_ended(event.key, describe_exit(event.exit_code, event.log_tail))

    def _on_node_lost(self, node_id: str, reason: str) -> None:
        with self._lock:
            lost = [
                key
                for key, (group, n) in self._keys.items()
                if group.ranks[n].seat.node_id == node_id and group.ranks[n].placeholder.identity == key
            ]
        if not self._is_closed:
            self._reopen(node_id)  # first, so that whoever sees its rank dead can relaunch it
        for key in lost:
            self._rank_ended(key, reason)

    def _reopen(self, node_id: str) -> None:
        del self._nodes[node_id]
        try:
            client = self._nodes[node_id] = self._backend.reopen(node_id)
        except RunError:
            return  # the node is gone for good: launches on it say so
        client.start(self._launcher.hub())
        if len(self._nodes) > 1:
            client.start(self._launcher.store_server(client))

    def _rank_ended(self, key: str, reason: str) -> None:
        with self._lock:
            group, n = self._keys[key]
            rank = group.ranks[n]
            if rank.placeholder.identity != key or not rank.is_running:
                return
            rank.is_running = False
            was_asked_for = group.is_closing
            rank.death = None if was_asked_for else reason
            has_greeted = rank.member is not None
            handle = group.ready[n]
            self._changed.notify_all()
        self._forget(rank)
        told = "its group was closed" if was_asked_for else reason
        self.context.directory.report_death(key, told)
        if not was_asked_for:
            self.context.hub.submit("registry.died", [key, reason])
        if not has_greeted:
            handle.fill(0, PeerDiedError(f"{rank.placeholder.name} died before it was ready: {reason}"))

    def _forget(self, rank: _Rank) -> None:
        if rank.member is not None:
            self.context.mailbox.forget(rank.member.address.endpoint_from(self.context.node_id))
            self.context.mailbox.forget(rank.member.endpoint_for(self.context.node_id, concurrent=False))
            if rank.member.address.raw_endpoint:
                self.context.mailbox.forget(rank.member.address.raw_endpoint)

    def _node(self, node_id: str) -> NodeClient:
        if node_id not in self._nodes:
            raise RunError(f"{node_id} is gone: its devices cannot be used any more")
        return self._nodes[node_id]

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
        with self._lock:
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


def _close_at_exit(close: weakref.WeakMethod[Any]) -> None:
    method = close()
    if method is not None:
        method()
