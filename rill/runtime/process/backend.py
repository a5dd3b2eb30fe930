"""What a cluster needs from a place to run: nodes to start processes on, and their devices.

`LocalNode` is the node that this process runs on: its agent, started as a child. Requests go to the agent over a pipe;
its events come back on the object's reader thread. The Ray backend runs one inside an actor on every node.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from rill.errors import RunError
from rill.runtime.device.device import (
    Device,
    DeviceSpec,
    Node,
    NodeDevices,
    devices_of_nodes,
    local_devices,
)
from rill.runtime.process.agent import AgentSpec, Exited, Start, bootstrap
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
    """As the node has found them: the cluster numbers them."""
    session_dir: str
    """The session's folders on that node."""
    shm_dir: str

    def request(self, what: Start | str) -> None:
        """Start a process, whose Exited event follows; or, by its key, kill one and its group."""

    def close(self) -> None:
        """End every process of the session on this node. Safe to call twice."""


def _start_agent(entry: str, *arguments: object) -> tuple[Connection[Any, Any], subprocess.Popen[bytes]]:
    """An agent as a child of this process: this end of their pipe, and the child."""
    control, theirs = Pipe()
    given = ", ".join(map(repr, (theirs.fileno(), *arguments)))
    command = bootstrap(f"rill.runtime.process.agent:{entry}", given, list(sys.path))
    fds, nothing = [theirs.fileno()], subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=fds, stdin=nothing, start_new_session=True)
    theirs.close()
    return control, process


_ahead: list[tuple[Connection[Any, Any], subprocess.Popen[bytes]]] = []
"""Agents whose cluster is still to come."""


@contextlib.contextmanager
def agent_ahead(modules: Sequence[str]) -> Iterator[None]:
    """Start the agent of the next cluster here now: it imports what workers need while this process imports what it
    needs itself. It ends with the block where no cluster came."""
    agent = control, process = _start_agent("main_ahead", tuple(modules))
    _ahead.append(agent)
    try:
        yield
    finally:
        if agent in _ahead:
            _ahead.remove(agent)
            control.close()
            process.kill()
            process.wait()


def _agent() -> tuple[Connection[Any, Any], subprocess.Popen[bytes]]:
    """The one that was started ahead, where it lives still."""
    while _ahead:
        control, process = _ahead.pop()
        if process.poll() is None:
            return control, process
        control.close()
    return _start_agent("main")


class LocalNode:
    def __init__(
        self, node: Node, session: Session, events: NodeEvents, devices: Sequence[Device] = ()
    ) -> None:
        self.node = node
        self.devices = devices
        self.session_dir = str(session.session_dir)
        self.shm_dir = str(session.shm_dir)
        self._events = events
        self._lock = threading.Lock()
        self._closing = False
        self._control, self._process = _agent()
        self.request(AgentSpec(self.session_dir, self.shm_dir, list(sys.path), events.preload))
        self._reader = threading.Thread(target=self._read_events, name="rill-node-events", daemon=True)
        self._reader.start()

    @property
    def agent_pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(RunError):
            self.request(None)
        try:
            self._process.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSE_WAIT_S)
        self._control.close()

    def request(self, what: AgentSpec | Start | str | None) -> None:
        """None: end the session here."""
        with self._lock:
            try:
                self._control.send(what)
            except OSError as error:
                raise RunError(f"the agent of {self.node.node_id} is gone ({error})") from error

    def _read_events(self) -> None:
        while True:
            try:
                event: Exited = self._control.recv()
            except (EOFError, OSError):
                break
            self._events.on_event(event)
        if not self._closing:
            reason = f"the agent of {self.node.node_id} (pid {self.agent_pid}) is gone"
            self._events.on_lost(self.node.node_id, reason)


class Backend(Protocol):
    is_spread: bool
    """Whether there are several nodes, or may be later: processes then listen on TCP too, under a key."""

    def open(self, session: Session, events: NodeEvents) -> Iterable[NodeClient]:
        """Start an agent on every node, the driver's own first. Where one fails, none is left but those given."""

    def add(self, devices: NodeDevices, labels: Collection[str]) -> NodeClient:
        """Start an agent on one more node."""

    def reopen(self, node_id: str) -> NodeClient:
        """Start the agent of a node again after it was lost; RunError where the node is gone for good."""

    def close(self) -> None:
        """Give back what `open` took, after the nodes are closed."""


class LocalBackend:
    """This machine, as one node or as several.

    Several nodes on one machine are a rehearsal: each has folders, an agent and devices of its own, and everything
    between them goes over TCP as it would between machines.
    """

    _driver_session: Session
    _events: NodeEvents
    """Both are given by `open`."""

    def __init__(
        self,
        devices: DeviceSpec,
        *,
        num_nodes: int = 1,
        node_labels: Sequence[Collection[str]] = (),
        elastic: bool = False,
    ) -> None:
        """`devices` counts per node, or is given by label. `node_labels`: those of each node, in their order.
        `elastic`: nodes may be added later."""
        own = [*node_labels, *[()] * (num_nodes - len(node_labels))]
        self._first = [Node(node_id=f"node{n}", labels=frozenset(own[n])) for n in range(num_nodes)]
        by_node = devices_of_nodes(devices, self._first)
        self._devices = {node_id: local_devices(wanted) for node_id, wanted in by_node.items()}
        self.is_spread = num_nodes > 1 or elastic
        self._nodes: dict[str, tuple[Node, Session]] = {}
        """All there ever were."""

    def open(self, session: Session, events: NodeEvents) -> Iterator[NodeClient]:
        self._events = events
        self._driver_session = session
        for node in self._first:
            yield self._start(node, self._devices[node.node_id])

    def add(self, devices: NodeDevices, labels: Collection[str]) -> NodeClient:
        if not self.is_spread:
            raise RunError("this cluster was opened for one node: others need elastic=True, or Cluster.ray")
        found = local_devices(devices)
        return self._start(Node(node_id=f"node{len(self._nodes)}", labels=frozenset(labels)), found)

    def reopen(self, node_id: str) -> NodeClient:
        return LocalNode(*self._nodes[node_id], self._events)

    def close(self) -> None:
        """The folders of the driver's own node are the cluster's to remove."""
        for _, session in self._nodes.values():
            if session is not self._driver_session:
                session.close()

    def _start(self, node: Node, devices: Sequence[Device]) -> NodeClient:
        session = self._driver_session
        if self._nodes:
            session = open_session(f"{session.session_id}-{node.node_id}")
        self._nodes[node.node_id] = (node, session)
        return LocalNode(node, session, self._events, devices)
