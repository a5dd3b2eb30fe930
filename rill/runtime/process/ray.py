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
    on_node,
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

    def __init__(self, address: str, devices: DeviceSpec) -> None:
        self._ray = import_ray()
        self._address = address
        self._devices = devices
        self._has_started_ray = False
        self._local: Node | None = None
        self._session: Session | None = None
        self._events: NodeEvents | None = None
        self._ray_ids: dict[str, str] = {}
        """Node id -> Ray's id of the node, for those in use."""
        self._num_made = 0

    def open(self, session: Session, events: NodeEvents) -> list[NodeClient]:
        ray = self._ray
        if not ray.is_initialized():
            self._connect()
        self._session, self._events = session, events
        here = ray.get_runtime_context().get_node_id()
        raws = sorted(self._unused(), key=lambda raw: (raw["NodeID"] != here, raw["NodeManagerAddress"]))
        nodes = [self._take(raw) for raw in raws]
        wanted = devices_of_nodes(self._devices, nodes)
        self._local = nodes[0]
        local = self._start_local(local_devices(wanted[nodes[0].node_id]))
        remote = [self._start_remote(node) for node in nodes[1:]]  # side by side
        opened: list[NodeClient] = [local, *remote]
        try:
            for client in remote:
                client.wait_ready(wanted[client.node.node_id])
        except BaseException:
            for started in opened:
                started.close()
            raise
        return opened

    def add(self, devices: NodeDevices, labels: Collection[str], host: str | None) -> NodeClient:
        """A node that has joined the Ray cluster, or has come back to it; `host`: that one."""
        unused = [raw for raw in self._unused() if host in (None, raw["NodeManagerAddress"])]
        if not unused:
            where = "" if host is None else f" at {host}"
            raise RunError(f"the Ray cluster has no further node{where}: `ray start --address=…` adds one")
        node = self._take(unused[0], labels)
        client = self._start_remote(node)
        try:
            client.wait_ready(devices)
        except BaseException:
            client.close()
            self.release(node.node_id)
            raise
        return client

    def reopen(self, node_id: str) -> NodeClient:
        if self._local is None or node_id != self._local.node_id:
            self.release(node_id)
            raise RunError(f"{node_id} is gone from the Ray cluster: add_node takes it back when it is there")
        return self._start_local()

    def release(self, node_id: str) -> None:
        self._ray_ids.pop(node_id, None)

    def close(self) -> None:
        if self._has_started_ray:
            self._ray.shutdown()

    def _unused(self) -> list[dict[str, Any]]:
        used = set(self._ray_ids.values())
        return [raw for raw in self._ray.nodes() if raw["Alive"] and raw["NodeID"] not in used]

    def _take(self, raw: dict[str, Any], labels: Collection[str] = ()) -> Node:
        node_id = f"node{self._num_made}"
        self._num_made += 1
        self._ray_ids[node_id] = raw["NodeID"]
        of_ray = {value for key, value in raw.get("Labels", {}).items() if not key.startswith("ray.io/")}
        return Node(node_id=node_id, host=raw["NodeManagerAddress"], labels=frozenset(of_ray).union(labels))

    def _start_local(self, devices: Sequence[Device] = ()) -> LocalNode:
        assert self._local is not None and self._session is not None and self._events is not None
        return LocalNode(self._local, self._session, self._events, devices)

    def _start_remote(self, node: Node) -> RayNode:
        assert self._session is not None and self._events is not None
        session_id = f"{self._session.session_id}-{node.node_id}"
        return RayNode(self._ray, node, self._ray_ids[node.node_id], session_id, self._events)

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
    def __init__(self, ray: Any, node: Node, ray_node_id: str, session_id: str, events: NodeEvents) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.node = node
        self.devices: Sequence[Device] = ()
        self.session_dir = ""
        self.shm_dir = ""
        self._ray = ray
        self._events = events
        self._is_closing = False
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
        self.session_dir, self.shm_dir, devices, num_cores = described
        self.node = replace(self.node, num_cores=num_cores)
        self.devices = on_node(devices, self.node)
        threading.Thread(target=self._read_events, name="rill-node-events", daemon=True).start()

    def start(self, request: Start) -> None:
        self._do(self._actor.start.remote(request))

    def kill(self, key: str) -> None:
        self._do(self._actor.kill.remote(key))

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
        """An answer comes every EVENT_POLL_S at the latest: it is the node's heartbeat."""
        while not self._is_closing:
            try:
                events = self._ray.get(self._actor.next_events.remote(EVENT_POLL_S), timeout=SILENCE_S)
            except self._ray.exceptions.RayError as error:  # a timeout is one of them
                if not self._is_closing:
                    summary = (str(error).strip() or f"silent for {SILENCE_S:g} s").splitlines()[0]
                    self._events.on_lost(self.node.node_id, f"{self.node.node_id} is lost: {summary}")
                return
            for event in events:
                self._events.on_event(event)


class NodeActor:
    """What runs inside Ray on another machine: a LocalNode, and its events in a queue."""

    def __init__(self, node: Node, session_id: str, preload: tuple[str, ...], sys_path: list[str]) -> None:
        sys.path.extend(path for path in sys_path if path not in sys.path)
        # Ray hides the GPUs from an actor that holds none of its resources; rill gives devices out itself.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self._session = open_session(session_id)
        self._events: queue.SimpleQueue[Exited] = queue.SimpleQueue()
        events = NodeEvents(
            preload=preload,
            on_event=self._events.put,
            on_lost=lambda *_: os._exit(1),  # without its agent the node is lost, and the driver sees it so
        )
        self._local = LocalNode(node, self._session, events)

    def describe(self, wanted: NodeDevices, accelerators: dict[str, str]) -> tuple[Any, ...]:
        for name, target in accelerators.items():
            ACCELERATORS.register(name, target)
        session = self._session
        return str(session.session_dir), str(session.shm_dir), local_devices(wanted), num_own_cores()

    def start(self, request: Start) -> None:
        self._local.start(request)

    def kill(self, key: str) -> None:
        self._local.kill(key)

    def next_events(self, timeout_s: float) -> list[Exited]:
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
