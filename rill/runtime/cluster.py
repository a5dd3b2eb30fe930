"""Where a run's processes live: nodes, devices with global ids, and the groups of workers placed on them.

    with Cluster(devices=4) as cluster:               # this machine: child processes, no daemon
    with Cluster.ray("auto", devices=4) as cluster:   # Ray finds the nodes and starts an agent on each

Leaving the `with` block, the driver's exit and the driver's death all end every process and remove every file of the
session. A worker's death fails the calls that wait for it and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from rill.errors import PlanError, RunError
from rill.runtime import context as runtime_context
from rill.runtime.address import DRIVER_GROUP, Site, WorkerAddress
from rill.runtime.context import RuntimeContext
from rill.runtime.device.device import Device, DeviceSpec, Node, NodeDevices, number
from rill.runtime.device.placement import Placement
from rill.runtime.group import Move, WorkerGroup
from rill.runtime.hub.history import CallRecord
from rill.runtime.process.agent import Exited, allow_many_files
from rill.runtime.process.backend import Backend, LocalBackend, NodeClient, NodeEvents
from rill.runtime.process.launcher import HUB_KEY, Launcher
from rill.runtime.process.mailbox import free_port
from rill.runtime.process.session import open_session
from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.supervisor import Supervisor
from rill.runtime.worker import Worker

_log = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

CLOSE_WAIT_S = 2.0
"""What all groups together are given to end in order when the cluster closes."""


class Cluster:
    """The nodes, devices and groups of one run, seen from the driver."""

    def __init__(
        self,
        devices: DeviceSpec = "auto",
        *,
        elastic: bool = False,
        preload: Sequence[str] = (),
        trace_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`devices`: "auto", a number, "cpu:4", "cuda:2,cpu:4", a list of Device, or these by label of the node (see
        DeviceSpec). `elastic`: nodes may be added while it runs; its processes then listen on TCP, under a key.
        `preload`: modules that workers find imported, e.g. "torch": it then costs its time and memory once (only for
        modules that stand a fork).
        `trace_dir`: where workers write their trace. `log_dir`: keep the workers' output and stuck-run reports there;
        else the output is removed with the session, and reports stay in the system's temporary directory."""
        self._lock = threading.Lock()
        self._reopening = threading.Lock()
        self._is_closed = True  # until it is open
        self._owner_pid = os.getpid()
        self._backend = backend or LocalBackend(devices, elastic=elastic)
        self._next_device_id = 0
        self.devices: tuple[Device, ...] = ()
        self._nodes: dict[str, NodeClient] = {}
        allow_many_files()
        with contextlib.ExitStack() as undo:  # whatever fails below, nothing is left behind
            self.session = open_session()
            undo.callback(self.session.close)
            report_dir = Path(log_dir).absolute() if log_dir is not None else None
            self._log_dir = report_dir or self.session.session_dir / "logs"
            self._log_dir.mkdir(parents=True, exist_ok=True)
            undo.callback(self._backend.close)
            events = NodeEvents(preload=tuple(preload), on_event=self._on_event, on_lost=self._on_node_lost)
            undo.callback(self._close_nodes)
            for client in self._backend.open(self.session, events):
                self._admit(client)
            first = self.nodes[0]
            is_spread = self._backend.is_spread
            site = Site(
                session_dir=self.session.session_dir,
                shm_dir=self.session.shm_dir,
                node_id=first.node_id,
                hub_endpoint=f"ipc://{self.session.session_dir}/hub.sock",
                host=first.host,
                key=SessionKey.new() if is_spread else None,
                report_dir=report_dir,
            )
            self.context = RuntimeContext(site, WorkerAddress(DRIVER_GROUP, 0, first.node_id))
            undo.callback(self.context.close)
            self._launcher = Launcher(
                context=self.context,
                hub_tcp=f"tcp://{first.host}:{free_port(first.host)}" if is_spread else "",
                log_dir=self._log_dir,
                trace_dir=str(trace_dir) if trace_dir is not None else None,
            )
            self._supervisor = Supervisor(self.context, self._launcher, self._node, lambda: self.devices)
            for client in self._nodes.values():
                self._start_services(client)
            self.context.mailbox.start()
            runtime_context.install(self.context)
            atexit.register(self.close)
            self._undo = undo.pop_all()
            self._is_closed = False

    @classmethod
    def ray(cls, address: str = "local", devices: DeviceSpec = "auto", **options: Any) -> Cluster:
        """On Ray: "local" starts a cluster here, "auto" joins the one at hand, else its address. `devices` counts per
        node, or is given by the labels of Ray's nodes. `options` are those of Cluster."""
        from rill.runtime.process.ray import RayBackend

        return cls(backend=RayBackend(address, devices), **options)

    @property
    def nodes(self) -> list[Node]:
        """The machines, the driver's first."""
        return [client.node for client in self._nodes.values()]

    @property
    def moves(self) -> list[Move]:
        """The moves of groups so far, with what they took."""
        return list(self._supervisor.moves)

    def coreside(self, *groups: str) -> None:
        """Say that these groups fit on the devices they share: they keep their memory there and need no turns."""
        self.context.hub.call("locks.coreside", list(groups))

    def take_turns(self, *groups: str) -> None:
        """Undo `coreside` for these groups: they take turns again, and give their memory back for others."""
        self.context.hub.call("locks.take_turns", list(groups))

    def history(self, since_s: float = 0.0) -> list[CallRecord]:
        """What the last calls of all workers took, put, held and waited for: the planner's material. `since_s`: only
        those that ended after this time.time()."""
        records: list[CallRecord] = self.context.hub.call("history.calls", since_s, answer=list[CallRecord])
        return records

    def launch(self, cls: type[W], name: str, placement: Placement, *options: Any) -> WorkerGroup[W]:
        """Start a group's processes; `Worker.launch` is the usual way here, and waits until they are ready."""
        self._supervisor.launch(cls, name, placement, *options)
        return WorkerGroup(cls, name, self._supervisor)

    # --- nodes that come and go ---------------------------------------------------------------------------

    def add_node(self, devices: NodeDevices = "auto", *, labels: Collection[str] = ()) -> Node:
        """Take one more node in; its devices get ids that were never used, and groups can be placed on them.

        With Ray: a node that has joined the Ray cluster or has come back to it. Else one more node on this machine (a
        rehearsal); the cluster must be `elastic`.
        """
        self._check_open()
        client = self._backend.add(devices, labels)
        try:
            self._admit(client)
            self._start_services(client)
        except BaseException:
            self._dismiss(client.node.node_id)
            raise
        return client.node

    def remove_node(self, node_id: str, *, notice_s: float = 0.0) -> None:
        """End what runs on a node, as `WorkerGroup.remove` does, and give the node up. Items of channels that were put
        there and are not taken yet go with it."""
        self._check_open()
        if node_id == self.context.site.node_id:
            raise PlanError(f"{node_id} is the driver's own node: close the cluster instead")
        self._node(node_id)
        for group, ranks in self._supervisor.ranks_on(node_id).items():
            self._supervisor.remove(group, ranks, notice_s)
        self._dismiss(node_id)

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process and remove every file of the session. Safe to call twice."""
        with self._lock:
            if self._is_closed or os.getpid() != self._owner_pid:  # a fork of the driver owns nothing
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._supervisor.close(CLOSE_WAIT_S)
        runtime_context.uninstall(self.context)
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- nodes --------------------------------------------------------------------------------------------

    def _close_nodes(self) -> None:
        for client in self._nodes.values():
            client.close()

    def _admit(self, client: NodeClient) -> None:
        where, labels = client.node.node_id, client.node.labels
        devices = [replace(d, node_id=where, labels=d.labels | labels) for d in client.devices]
        self.devices = (*self.devices, *number(devices, self._next_device_id))
        self._next_device_id += len(devices)
        self._nodes[where] = client

    def _dismiss(self, node_id: str) -> None:
        self.devices = tuple(device for device in self.devices if device.node_id != node_id)
        self._nodes.pop(node_id).close()

    def _start_services(self, client: NodeClient) -> None:
        """The hub on the driver's node, and where there may be several nodes a store server on each."""
        if client.node.node_id == self.context.site.node_id:
            client.request(self._launcher.hub())
        if self._backend.is_spread:
            client.request(self._launcher.store_server(client))

    def _on_event(self, event: Exited) -> None:
        how = event.how
        if not event.is_service:
            self._supervisor.process_ended(event.key, how)
            return
        if event.key != HUB_KEY:
            with contextlib.suppress(RunError):  # where there is no hub any more, nobody needs to know
                self.context.hub.submit("registry.died", [f"{event.key}[0]#{event.pid}", how])
        if event.is_restarted:
            _log.warning("%s (pid %d) ended and was started again: %s", event.key, event.pid, how)
            return
        _log.error("%s ended too often and is not started again, so the run will stop: %s", event.key, how)
        if event.key == HUB_KEY:
            self._supervisor.hub_lost(f"the hub ended too often and is not started again: {how}")

    def _on_node_lost(self, node_id: str, reason: str) -> None:
        with self._reopening:  # one that is gone again at once may tell before it is known here
            if self._is_closed or node_id not in self._nodes:
                return
            del self._nodes[node_id]
            try:  # first, so that whoever sees its rank dead can relaunch it
                client = self._nodes[node_id] = self._backend.reopen(node_id)
            except (RunError, OSError) as error:  # it is gone for good: launches on it say so
                _log.error("the agent of %s cannot be started again: %s", node_id, error)
                self.devices = tuple(device for device in self.devices if device.node_id != node_id)
            else:
                with contextlib.suppress(RunError):  # gone again: that is told too
                    self._start_services(client)
            self._supervisor.node_lost(node_id, reason)
            if node_id == self.context.site.node_id and node_id not in self._nodes:
                self._supervisor.hub_lost(reason)

    def _node(self, node_id: str) -> NodeClient:
        if node_id not in self._nodes:
            raise RunError(f"{node_id} is gone: its devices cannot be used any more")
        return self._nodes[node_id]

    def _check_open(self) -> None:
        if self._is_closed:
            raise RunError("the cluster is closed")
