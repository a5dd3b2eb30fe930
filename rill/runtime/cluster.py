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
import functools
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rill.errors import PlanError, RunError
from rill.runtime import context as runtime_context
from rill.runtime.context import DRIVER_GROUP, RuntimeContext, WorkerAddress
from rill.runtime.device.device import Device, DeviceSpec, Node, number
from rill.runtime.device.placement import Placement, resolve, share_processes
from rill.runtime.group import ClassRef, WorkerGroup
from rill.runtime.hub.history import CallRecord
from rill.runtime.process.agent import allow_many_files
from rill.runtime.process.agent_client import NodeClient
from rill.runtime.process.agent_protocol import Event, Exited
from rill.runtime.process.backend import Backend, LocalBackend
from rill.runtime.process.call import CallBook
from rill.runtime.process.launcher import Launcher, is_service
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.process.session import open_session
from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.supervisor import Supervisor, describe_exit
from rill.runtime.transfer.collective import free_port
from rill.runtime.worker import Worker

_log = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

HUB_WAIT_S = 30.0
CLOSE_WAIT_S = 2.0
"""What all groups together are given to end in order when the cluster closes."""


class Cluster:
    """The nodes, devices and groups of one run, seen from the driver."""

    def __init__(
        self,
        devices: DeviceSpec = "auto",
        *,
        labels: Sequence[str] = (),
        preload: Sequence[str] = (),
        trace_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`devices`: "auto", a number, "cpu:4", "cuda:2,cpu:4", a list of Device, or these by label of the node (see
        DeviceSpec). `preload`: modules that workers find imported, e.g. "torch": it then costs its time and memory
        once (only for modules that stand a fork).
        `trace_dir`: where workers write their trace. `log_dir`: keep the workers' output and stuck-run reports there;
        else the output is removed with the session, and reports stay in the system's temporary directory."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._backend = backend or LocalBackend(devices, frozenset(labels))
        self.session = open_session()
        self._report_dir = Path(log_dir).absolute() if log_dir is not None else None
        self._log_dir = self._report_dir or self.session.session_dir / "logs"
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
        self._mailbox, self._context = self._make_context(first)
        self._launcher = Launcher(
            self.context,
            hub_tcp=hub_tcp,
            log_dir=self._log_dir,
            trace_dir=str(trace_dir) if trace_dir is not None else None,
        )
        self._supervisor = Supervisor(self.context, self._launcher, self._node)
        for client in opened.nodes:
            self._start_services(client)
        self.context.open()
        self._mailbox.start()
        self.context.directory.publish(self.context.address, 1)
        runtime_context.install(self.context)
        self._at_exit = functools.partial(_close_at_exit, weakref.WeakMethod(self.close))
        atexit.register(self._at_exit)

    @classmethod
    def ray(cls, address: str = "local", devices: DeviceSpec = "auto", **options: Any) -> Cluster:
        """On Ray: "local" starts a cluster here, "auto" joins the one at hand, else its address. `devices` counts per
        node, or is given by the labels of Ray's nodes. `options` are those of Cluster."""
        from rill.runtime.process.ray import RayBackend

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

    def history(self) -> list[CallRecord]:
        """What the last calls of all workers took, put, held and waited for: the planner's material."""
        records: list[CallRecord] = self.context.hub.query(
            "history", "calls", None, HUB_WAIT_S, list[CallRecord]
        )
        return records

    # --- groups -------------------------------------------------------------------------------------------

    def launch(
        self,
        cls: type[W],
        *,
        name: str,
        placement: Placement = "all",
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        ranks_per_process: int = 1,
        peer_access: bool = False,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> WorkerGroup[W]:
        """Start a group's processes; `Worker.launch` is the usual way here, and waits until they are ready."""
        if ranks_per_process < 1:
            raise PlanError(f"{name}: ranks_per_process={ranks_per_process}: give at least 1")
        ref = ClassRef.of(cls)
        seats = share_processes(resolve(placement, self.devices), ranks_per_process)
        world_size = self._supervisor.launch(
            ref,
            name,
            seats,
            env=dict(env or {}),
            threads=threads,
            peers=self.devices if peer_access else (),
            init_kwargs=init_kwargs or {},
        )
        return WorkerGroup(cls, name, world_size, self._supervisor)

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process and remove every file of the session. Safe to call twice."""
        with self._lock:
            if self._is_closed or os.getpid() != self._owner_pid:  # a fork of the driver owns nothing
                return
            self._is_closed = True
        atexit.unregister(self._at_exit)
        self._supervisor.close(CLOSE_WAIT_S)
        runtime_context.uninstall(self.context)
        self.context.close()
        self.context.calls.close()
        self._mailbox.close()
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

    # --- nodes --------------------------------------------------------------------------------------------

    def _make_context(self, node: Node) -> tuple[Mailbox, RuntimeContext]:
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
        context = RuntimeContext(
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
            report_dir=self._report_dir,
        )
        return mailbox, context

    def _start_services(self, client: NodeClient) -> None:
        """The hub on the driver's node, and where there are several nodes a store server on each."""
        if client.node.node_id == self.context.node_id:
            client.start(self._launcher.hub())
        if self.context.num_nodes > 1:
            client.start(self._launcher.store_server(client))

    def _on_event(self, event: Event) -> None:
        """On a node's reader thread."""
        if not isinstance(event, Exited):
            return
        how = describe_exit(event.exit_code, event.log_tail)
        if not is_service(event.key):
            self._supervisor.process_ended(event.key, how)
        elif event.is_restarted:
            _log.warning("%s (pid %d) ended and was started again: %s", event.key, event.pid, how)
        else:
            _log.error(
                "%s ended too often and is not started again, so the run will stop: %s", event.key, how
            )

    def _on_node_lost(self, node_id: str, reason: str) -> None:
        """On a node's reader thread."""
        if not self._is_closed:
            self._reopen(node_id)  # first, so that whoever sees its rank dead can relaunch it
        self._supervisor.node_lost(node_id, reason)

    def _reopen(self, node_id: str) -> None:
        del self._nodes[node_id]
        try:
            client = self._nodes[node_id] = self._backend.reopen(node_id)
        except RunError:
            return  # the node is gone for good: launches on it say so
        self._start_services(client)

    def _node(self, node_id: str) -> NodeClient:
        if node_id not in self._nodes:
            raise RunError(f"{node_id} is gone: its devices cannot be used any more")
        return self._nodes[node_id]


def _close_at_exit(close: weakref.WeakMethod[Any]) -> None:
    method = close()
    if method is not None:
        method()
