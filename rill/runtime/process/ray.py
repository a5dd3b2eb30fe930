"""The Ray backend: Ray finds the nodes, starts one agent on each and notices when a node is lost. Nothing more.

    driver ──▶ LocalNode (its own node)
           ──▶ RayNode ──Ray actor──▶ LocalNode on that node ──▶ agent ──▶ workers

Calls and data are rill's own. Devices are given out by global id, not by Ray's resources. A node is lost when Ray says
so, or when its actor has not answered for SILENCE_S.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Collection, Sequence
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
from rill.runtime.process.agent import Exited, Start
from rill.runtime.process.backend import LocalNode, NodeClient, NodeEvents
from rill.runtime.process.session import Session, open_session

START_WAIT_S = 120.0
EVENT_POLL_S = 30.0
SILENCE_S = 90.0


def import_ray() -> Any:
    """The one door to Ray."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("the Ray backend needs Ray: pip install 'rill[ray]'") from error
    return ray


class RayBackend:
    is_spread = True
    _session: Session
    _events: NodeEvents
    """Both are given by `open`."""

    def __init__(self, address: str, devices: DeviceSpec) -> None:
        self._ray = import_ray()
        self._address = address
        self._devices = devices
        self._has_started_ray = False
        self._local: Node | None = None
        self._remote: list[RayNode] = []
        """All there ever were."""

    def open(self, session: Session, events: NodeEvents) -> list[NodeClient]:
        if not self._ray.is_initialized():
            self._connect()
        self._session, self._events = session, events
        here, *others = self._unused()
        self._local = _node(0, here)
        nodes = [self._local, *(_node(n, raw) for n, raw in enumerate(others, 1))]
        wanted = devices_of_nodes(self._devices, nodes)
        devices = local_devices(wanted[self._local.node_id])
        opened: list[NodeClient] = [LocalNode(self._local, session, events, devices)]
        try:
            remote = [self._start_remote(*one) for one in zip(nodes[1:], others, strict=True)]  # side by side
            opened += remote
            for client in remote:
                client.wait_ready(wanted[client.node.node_id])
        except BaseException:
            for started in opened:
                started.close()
            raise
        return opened

    def add(self, devices: NodeDevices, labels: Collection[str]) -> NodeClient:
        """A node that has joined the Ray cluster, or has come back to it."""
        unused = self._unused()
        if not unused:
            raise RunError("the Ray cluster has no further node: `ray start --address=…` adds one")
        client = self._start_remote(_node(1 + len(self._remote), unused[0], labels), unused[0])
        try:
            client.wait_ready(devices)
        except BaseException:
            client.close()
            raise
        return client

    def reopen(self, node_id: str) -> NodeClient:
        if self._local is None or node_id != self._local.node_id:
            raise RunError(f"{node_id} is gone from the Ray cluster: add_node takes it back when it is there")
        return LocalNode(self._local, self._session, self._events)

    def close(self) -> None:
        if self._has_started_ray:
            self._ray.shutdown()

    def _unused(self) -> list[dict[str, Any]]:
        """What Ray says of the nodes that are not in use, the driver's own first."""
        here = self._ray.get_runtime_context().get_node_id()
        used = {client.ray_node_id for client in self._remote if not client.is_over}
        if self._local is not None:
            used.add(here)
        unused = [raw for raw in self._ray.nodes() if raw["Alive"] and raw["NodeID"] not in used]
        return sorted(unused, key=lambda raw: (raw["NodeID"] != here, raw["NodeManagerAddress"]))

    def _start_remote(self, node: Node, raw: dict[str, Any]) -> RayNode:
        session_id = f"{self._session.session_id}-{node.node_id}"
        client = RayNode(self._ray, node, raw["NodeID"], session_id, self._events)
        self._remote.append(client)
        return client

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


def _node(number: int, raw: dict[str, Any], labels: Collection[str] = ()) -> Node:
    """A node as Ray describes it."""
    of_ray = {value for key, value in raw.get("Labels", {}).items() if not key.startswith("ray.io/")}
    host, known = raw["NodeManagerAddress"], frozenset(of_ray).union(labels)
    return Node(node_id=f"node{number}", host=host, labels=known)


class RayNode:
    def __init__(self, ray: Any, node: Node, ray_node_id: str, session_id: str, events: NodeEvents) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.node = node
        self.ray_node_id = ray_node_id
        self.is_over = False
        """It was closed, or lost."""
        self.devices: Sequence[Device] = ()
        self.session_dir = ""
        self.shm_dir = ""
        self._ray = ray
        self._events = events
        affinity = NodeAffinitySchedulingStrategy(ray_node_id, soft=False)
        actor = ray.remote(NodeActor)
        actor = actor.options(num_cpus=0, max_concurrency=3, scheduling_strategy=affinity)
        self._actor = actor.remote(node, session_id, events.preload, list(sys.path))

    def wait_ready(self, wanted: NodeDevices) -> None:
        """Until the agent runs, and the node's devices are known."""
        try:
            asked = self._actor.describe.remote(wanted, dict(ACCELERATORS))
            described = self._ray.get(asked, timeout=START_WAIT_S)
        except self._ray.exceptions.RayError as error:
            raise RunError(f"no agent came up on {self.node.node_id} ({self.node.host}): {error}") from error
        self.session_dir, self.shm_dir, self.devices, num_cores = described
        self.node = replace(self.node, num_cores=num_cores)
        threading.Thread(target=self._read_events, name="rill-node-events", daemon=True).start()

    def request(self, what: Start | str) -> None:
        """Wait for it: the actor has several threads, and a kill must not overtake its start."""
        try:
            self._ray.get(self._actor.request.remote(what), timeout=START_WAIT_S)
        except self._ray.exceptions.RayError as error:
            raise RunError(f"{self.node.node_id} ({self.node.host}) does not answer: {error}") from error

    def close(self) -> None:
        self.is_over = True
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.close.remote(), timeout=START_WAIT_S)
        self._ray.kill(self._actor)

    def _read_events(self) -> None:
        """An answer comes every EVENT_POLL_S at the latest: it is the node's heartbeat."""
        while not self.is_over:
            try:
                events = self._ray.get(self._actor.next_events.remote(EVENT_POLL_S), timeout=SILENCE_S)
            except self._ray.exceptions.RayError as error:  # a timeout is one of them
                if not self.is_over:
                    self.is_over = True
                    summary = (str(error).strip() or f"silent for {SILENCE_S:g} s").splitlines()[0]
                    self._events.on_lost(self.node.node_id, f"{self.node.node_id} is lost: {summary}")
                return
            for event in events:
                self._events.on_event(event)


class NodeActor(LocalNode):
    """What runs inside Ray on another machine: that machine's node, and its events in a queue."""

    def __init__(self, node: Node, session_id: str, preload: tuple[str, ...], sys_path: list[str]) -> None:
        sys.path.extend(path for path in sys_path if path not in sys.path)
        # Ray hides the GPUs from an actor that holds none of its resources; rill gives devices out itself.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self._session = open_session(session_id)
        self._queue: queue.SimpleQueue[Exited] = queue.SimpleQueue()
        events = NodeEvents(
            preload=preload,
            on_event=self._queue.put,
            on_lost=lambda *_: os._exit(1),  # without its agent the node is lost, and the driver sees it so
        )
        super().__init__(node, self._session, events)

    def describe(self, wanted: NodeDevices, accelerators: dict[str, str]) -> tuple[Any, ...]:
        for name, target in accelerators.items():
            ACCELERATORS.register(name, target)
        return self.session_dir, self.shm_dir, local_devices(wanted), num_own_cores()

    def next_events(self, timeout_s: float) -> list[Exited]:
        """What happened since the last question; waits for the first."""
        try:
            events = [self._queue.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._queue.empty():
            events.append(self._queue.get())
        return events

    def close(self) -> None:
        super().close()
        self._session.close()
