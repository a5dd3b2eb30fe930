"""What a cluster needs from a place to run: nodes to start processes on, and their devices.

`LocalNode` is the node that this process runs on: its agent, started as a child. Requests go to the agent over a
socketpair; its events come back on the object's reader thread. The Ray backend runs one inside an actor on every node.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rill.errors import RunError
from rill.runtime.device.device import (
    Device,
    DeviceSpec,
    Node,
    NodeDevices,
    devices_of_nodes,
    local_devices,
    on_node,
)
from rill.runtime.process.agent import AgentSpec, Exited, Start, bootstrap, receive_message, send_message
from rill.runtime.process.session import Session, open_session

CLOSE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvents:
    """What a cluster hears from its nodes, on threads of theirs, and what it tells every agent."""

    preload: tuple[str, ...]
    on_event: Callable[[Exited], None]
    on_lost: Callable[[str, str], None]
    """Called with the node's id and the reason."""


class NodeClient(Protocol):
    """What a cluster needs from a node, wherever it is."""

    node: Node
    devices: Sequence[Device]
    session_dir: str
    """The session's folders on that node."""
    shm_dir: str

    def start(self, request: Start) -> None:
        """Start a process; its Exited event follows."""

    def kill(self, key: str) -> None:
        """End a process and its group."""

    def close(self) -> None:
        """End every process of the session on this node. Safe to call twice."""


class LocalNode:
    def __init__(
        self, node: Node, session: Session, events: NodeEvents, devices: Sequence[Device] = ()
    ) -> None:
        self.node = node
        self.devices: Sequence[Device] = on_node(devices, node)
        self.session_dir = str(session.session_dir)
        self.shm_dir = str(session.shm_dir)
        self._events = events
        self._lock = threading.Lock()
        self._closing = False
        self._control, theirs = socket.socketpair()
        command = bootstrap("rill.runtime.process.agent:main", str(theirs.fileno()), list(sys.path))
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        spec = AgentSpec(self.session_dir, self.shm_dir, list(sys.path), events.preload)
        send_message(self._control, spec)
        self._reader = threading.Thread(target=self._read_events, name="rill-node-events", daemon=True)
        self._reader.start()

    @property
    def agent_pid(self) -> int:
        return self._process.pid

    def start(self, request: Start) -> None:
        self._send(request)

    def kill(self, key: str) -> None:
        self._send(key)

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(RunError):
            self._send(None)
        try:
            self._process.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSE_WAIT_S)
        self._control.close()

    def _send(self, request: Start | str | None) -> None:
        with self._lock:
            try:
                send_message(self._control, request)
            except OSError as error:
                raise RunError(f"the agent of {self.node.node_id} is gone ({error})") from error

    def _read_events(self) -> None:
        while True:
            try:
                event = receive_message(self._control)
            except (EOFError, OSError):
                break
            assert isinstance(event, Exited)
            self._events.on_event(event)
        if not self._closing:
            reason = f"the agent of {self.node.node_id} (pid {self.agent_pid}) is gone"
            self._events.on_lost(self.node.node_id, reason)


class Backend(Protocol):
    is_spread: bool
    """Whether there are several nodes, or may be later: processes then listen on TCP too, under a key."""

    def open(self, session: Session, events: NodeEvents) -> Iterable[NodeClient]:
        """Start an agent on every node, the driver's own first. Where one fails, none is left but those given."""

    def add(self, devices: NodeDevices, labels: Collection[str], host: str | None) -> NodeClient:
        """Start an agent on one more node."""

    def reopen(self, node_id: str) -> NodeClient:
        """Start the agent of a node again after it was lost; RunError where the node is gone for good."""

    def release(self, node_id: str) -> None:
        """Give up a node whose agent has ended."""

    def close(self) -> None:
        """Give back what `open` took, after the nodes are closed."""


class LocalBackend:
    """This machine, as one node or as several.

    Several nodes on one machine are a rehearsal: each has folders, an agent and devices of its own, and everything
    between them goes over TCP as it would between machines.
    """

    def __init__(
        self,
        devices: DeviceSpec,
        labels: frozenset[str] = frozenset(),
        *,
        num_nodes: int = 1,
        node_labels: Sequence[Collection[str]] = (),
        elastic: bool = False,
    ) -> None:
        """`devices` counts per node, or is given by label. `node_labels`: more labels of each node, in their order.
        `elastic`: nodes may be added later."""
        own = [*node_labels, *[()] * (num_nodes - len(node_labels))]
        self._first = [Node(node_id=f"node{n}", labels=labels.union(own[n])) for n in range(num_nodes)]
        by_node = devices_of_nodes(devices, self._first)
        self._devices = {node_id: local_devices(wanted) for node_id, wanted in by_node.items()}
        self.is_spread = num_nodes > 1 or elastic
        self._num_made = num_nodes
        self._nodes: dict[str, tuple[Node, Session]] = {}
        self._driver_session: Session | None = None
        self._events: NodeEvents | None = None

    def open(self, session: Session, events: NodeEvents) -> Iterator[NodeClient]:
        self._events = events
        self._driver_session = session
        for n, node in enumerate(self._first):
            own = session if n == 0 else open_session(f"{session.session_id}-{node.node_id}")
            yield self._start(node, own, self._devices[node.node_id])

    def add(self, devices: NodeDevices, labels: Collection[str], host: str | None) -> NodeClient:
        if not self.is_spread:
            raise RunError("this cluster was opened for one node: others need elastic=True, or Cluster.ray")
        assert self._driver_session is not None
        node = Node(node_id=f"node{self._num_made}", host=host or "127.0.0.1", labels=frozenset(labels))
        found = local_devices(devices)
        self._num_made += 1
        own = open_session(f"{self._driver_session.session_id}-{node.node_id}")
        return self._start(node, own, found)

    def reopen(self, node_id: str) -> NodeClient:
        return self._start(*self._nodes[node_id], ())

    def release(self, node_id: str) -> None:
        """The folders of the driver's own node are the cluster's to remove."""
        _, session = self._nodes.pop(node_id)
        if session is not self._driver_session:
            session.close()

    def close(self) -> None:
        for node_id in list(self._nodes):
            self.release(node_id)

    def _start(self, node: Node, session: Session, devices: Sequence[Device]) -> NodeClient:
        assert self._events is not None
        self._nodes[node.node_id] = (node, session)
        return LocalNode(node, session, self._events, devices)
