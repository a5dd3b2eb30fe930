"""What a cluster needs from a place to run: nodes to start processes on, and their devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rill.errors import RunError
from rill.runtime.device.device import Device, DeviceSpec, Node, NodeDevices, devices_of_nodes, local_devices
from rill.runtime.process.agent_client import LocalNode, NodeClient, NodeEvents
from rill.runtime.process.session import Session, open_session


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A node with its agent, and its devices, which the cluster numbers."""

    client: NodeClient
    devices: Sequence[Device]


class Backend(Protocol):
    """A place to run."""

    is_spread: bool
    """Whether there are several nodes, or may be later: processes then listen on TCP too, under a key."""

    def open(self, session: Session, events: NodeEvents) -> list[OpenedNode]:
        """Start an agent on every node, the driver's own first. Where one fails, none is left."""

    def add(self, devices: NodeDevices, labels: Collection[str], host: str | None) -> OpenedNode:
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
        self._devices = {n.node_id: local_devices(by_node[n.node_id], labels=n.labels) for n in self._first}
        self.is_spread = num_nodes > 1 or elastic
        self._num_made = num_nodes
        self._nodes: dict[str, tuple[Node, Session]] = {}
        self._driver_session: Session | None = None
        self._events: NodeEvents | None = None

    def open(self, session: Session, events: NodeEvents) -> list[OpenedNode]:
        self._events = events
        self._driver_session = session
        opened: list[OpenedNode] = []
        try:
            for n, node in enumerate(self._first):
                own = session if n == 0 else open_session(f"{session.session_id}-{node.node_id}")
                opened.append(self._start(node, own, self._devices[node.node_id]))
        except BaseException:
            for made in opened:
                made.client.close()
            raise
        return opened

    def add(self, devices: NodeDevices, labels: Collection[str], host: str | None) -> OpenedNode:
        if not self.is_spread:
            raise RunError("this cluster was opened for one node: others need elastic=True, or Cluster.ray")
        assert self._driver_session is not None
        node = Node(node_id=f"node{self._num_made}", host=host or "127.0.0.1", labels=frozenset(labels))
        found = local_devices(devices, labels=node.labels)
        self._num_made += 1
        own = open_session(f"{self._driver_session.session_id}-{node.node_id}")
        return self._start(node, own, found)

    def reopen(self, node_id: str) -> NodeClient:
        node, session = self._nodes[node_id]
        return self._start(node, session, ()).client

    def release(self, node_id: str) -> None:
        """The folders of the driver's own node are the cluster's to remove."""
        _, session = self._nodes.pop(node_id)
        if session is not self._driver_session:
            session.close()

    def close(self) -> None:
        for node_id in list(self._nodes):
            self.release(node_id)

    def _start(self, node: Node, session: Session, devices: Sequence[Device]) -> OpenedNode:
        assert self._events is not None
        self._nodes[node.node_id] = (node, session)
        client = LocalNode(node, session, self._events)
        return OpenedNode(client, [replace(device, node_id=node.node_id) for device in devices])
