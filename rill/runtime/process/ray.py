"""The Ray backend: Ray finds the nodes, starts one agent on each and notices when a node is lost. Nothing more.

    driver ──▶ LocalNode (its own node)
           ──▶ RayNode ──Ray actor──▶ LocalNode on that node ──▶ agent ──▶ workers

Calls, transfers and channels do not pass through Ray: they are rill's own, as on one machine. Devices are given out
by global id, not by Ray's resources: a process may hold any devices of any node. Ray's token authentication is left
as it is found.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rill.errors import MissingExtraError, RunError
from rill.runtime.device.accelerator import ACCELERATORS
from rill.runtime.device.device import (
    Device,
    DeviceSpec,
    Node,
    NodeDevices,
    devices_of_nodes,
    local_devices,
    num_own_cores,
)
from rill.runtime.process.agent_client import LocalNode, NodeClient
from rill.runtime.process.agent_protocol import Event, Start
from rill.runtime.process.backend import Opened
from rill.runtime.process.session import Session, open_session

START_WAIT_S = 120.0
EVENT_POLL_S = 30.0


def import_ray() -> Any:
    """The one door to Ray."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("the Ray backend needs Ray: pip install 'rill[ray]'") from error
    return ray


class RayBackend:
    """A Ray cluster as a place to run."""

    def __init__(self, address: str, devices: DeviceSpec) -> None:
        self._ray = import_ray()
        self._address = address
        self._devices = devices
        self._has_started_ray = False
        self._remote: dict[str, RayNode] = {}
        self._start_local: Callable[[], LocalNode] | None = None
        self._local_id = ""

    def open(
        self,
        session: Session,
        preload: tuple[str, ...],
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str, str], None],
    ) -> Opened:
        ray = self._ray
        if not ray.is_initialized():
            self._connect()
        here = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        ordered = sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
        nodes = [_describe(n, raw) for n, raw in enumerate(ordered)]
        wanted = devices_of_nodes(self._devices, nodes)
        self._local_id = nodes[0].node_id
        self._start_local = lambda: LocalNode(
            nodes[0],
            session_id=session.session_id,
            session_dir=str(session.session_dir),
            shm_dir=str(session.shm_dir),
            preload=preload,
            on_event=on_event,
            on_lost=lambda reason: on_lost(nodes[0].node_id, reason),
        )
        clients: list[NodeClient] = [self._start_local()]
        devices = _on_node(local_devices(wanted[nodes[0].node_id]), nodes[0])
        for node, raw in zip(nodes[1:], ordered[1:], strict=True):
            remote = RayNode(
                ray, node, raw["NodeID"], f"{session.session_id}-{node.node_id}", preload, on_event, on_lost
            )
            self._remote[node.node_id] = remote
            clients.append(remote)
        for remote in self._remote.values():
            devices += _on_node(remote.ready(wanted[remote.node.node_id]), remote.node)
        return Opened(clients, devices)

    def reopen(self, node_id: str) -> NodeClient:
        if node_id != self._local_id:
            raise RunError(f"{node_id} is gone from the Ray cluster")
        assert self._start_local is not None
        return self._start_local()

    def close(self) -> None:
        if self._has_started_ray:
            self._ray.shutdown()

    def _connect(self) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self._address == "local":
            options |= {"include_dashboard": False}
        try:
            self._ray.init(address=self._address, **options)
        except ConnectionError as error:
            raise RunError(
                f"no Ray cluster answers at {self._address!r}: {error}. Start one (ray start --head) and give its "
                "address as HOST:PORT, or use cluster.address = 'local', which starts one for the run"
            ) from error
        self._has_started_ray = True


class RayNode:
    """A NodeClient for another machine of the Ray cluster."""

    def __init__(
        self,
        ray: Any,
        node: Node,
        ray_node_id: str,
        session_id: str,
        preload: tuple[str, ...],
        on_event: Callable[[Event], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.node = node
        self.session_dir = ""
        self.shm_dir = ""
        self._ray = ray
        self._on_event = on_event
        self._on_lost = on_lost
        self._is_closing = False
        affinity = NodeAffinitySchedulingStrategy(ray_node_id, soft=False)
        actor_class = ray.remote(NodeActor).options(
            num_cpus=0, max_concurrency=3, scheduling_strategy=affinity
        )
        self._actor = actor_class.remote(node, session_id, preload, list(sys.path))

    def ready(self, wanted: NodeDevices) -> list[Device]:
        """Wait until the agent runs; the node's devices."""
        try:
            described = self._ray.get(
                self._actor.describe.remote(wanted, dict(ACCELERATORS)), timeout=START_WAIT_S
            )
        except self._ray.exceptions.RayError as error:
            raise RunError(f"no agent came up on {self.node.node_id} ({self.node.host}): {error}") from error
        self.session_dir, self.shm_dir, devices, num_cores = described
        self.node = replace(self.node, num_cores=num_cores)
        threading.Thread(target=self._read_events, name="rill-node-events", daemon=True).start()
        found: list[Device] = devices
        return found

    def start(self, request: Start) -> None:
        self._do(self._actor.start.remote(request))

    def kill(self, key: str, signal_number: int) -> None:
        self._do(self._actor.kill.remote(key, signal_number))

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.close.remote(), timeout=START_WAIT_S)
        self._ray.kill(self._actor)

    def _do(self, request: Any) -> None:
        """Wait for it: the actor has several threads, and a kill must not overtake its start."""
        try:
            self._ray.get(request, timeout=START_WAIT_S)
        except self._ray.exceptions.RayError as error:
            raise RunError(f"{self.node.node_id} ({self.node.host}) does not answer: {error}") from error

    def _read_events(self) -> None:
        while not self._is_closing:
            try:
                events = self._ray.get(self._actor.next_events.remote(EVENT_POLL_S))
            except self._ray.exceptions.RayError as error:
                if not self._is_closing:
                    summary = str(error).strip().splitlines()[0]
                    self._on_lost(self.node.node_id, f"{self.node.node_id} is lost: {summary}")
                return
            for event in events:
                self._on_event(event)


class NodeActor:
    """What runs inside Ray on another machine: a LocalNode, and its events in a queue."""

    def __init__(self, node: Node, session_id: str, preload: tuple[str, ...], sys_path: list[str]) -> None:
        sys.path.extend(path for path in sys_path if path not in sys.path)
        # Ray hides the GPUs from an actor that holds none of its resources; rill gives devices out itself.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self._session = open_session(session_id)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._local = LocalNode(
            node,
            session_id=session_id,
            session_dir=str(self._session.session_dir),
            shm_dir=str(self._session.shm_dir),
            preload=preload,
            on_event=self._events.put,
            on_lost=lambda _: os._exit(1),  # without its agent the node is lost, and the driver sees it so
        )

    def describe(
        self, wanted: NodeDevices, accelerators: dict[str, str]
    ) -> tuple[str, str, list[Device], int]:
        for name, target in accelerators.items():
            ACCELERATORS.register(name, target)
        session = self._session
        return str(session.session_dir), str(session.shm_dir), local_devices(wanted), num_own_cores()

    def start(self, request: Start) -> None:
        self._local.start(request)

    def kill(self, key: str, signal_number: int) -> None:
        self._local.kill(key, signal_number)

    def next_events(self, timeout_s: float) -> list[Event]:
        """What happened since the last question; waits for the first."""
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def close(self) -> None:
        self._local.close()
        self._session.close()


def _describe(number: int, raw: dict[str, Any]) -> Node:
    labels = raw.get("Labels", {})
    names = {value for key, value in labels.items() if not key.startswith("ray.io/")}
    return Node(node_id=f"node{number}", host=raw["NodeManagerAddress"], labels=frozenset(names))


def _on_node(devices: Sequence[Device], node: Node) -> list[Device]:
    return [replace(device, node_id=node.node_id, labels=device.labels | node.labels) for device in devices]
