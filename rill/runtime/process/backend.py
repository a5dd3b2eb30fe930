"""What a cluster needs from a place to run: nodes to start processes on, and their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rill.runtime.device.device import Device, DeviceSpec, Node, devices_of_nodes, local_devices
from rill.runtime.process.agent_client import LocalNode, NodeClient
from rill.runtime.process.agent_protocol import Event
from rill.runtime.process.session import Session, open_session


@dataclass(frozen=True, slots=True)
class Opened:
    """The nodes, the driver's own first, and every device of theirs in the order of ids."""

    nodes: Sequence[NodeClient]
    devices: Sequence[Device]


class Backend(Protocol):
    """A place to run. `on_event` and `on_lost(node_id, reason)` are called from threads of the backend."""

    def open(
        self,
        session: Session,
        preload: tuple[str, ...],
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str, str], None],
    ) -> Opened:
        """Start an agent on every node."""

    def reopen(self, node_id: str) -> NodeClient:
        """Start the agent of a node again after it was lost."""

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
    ) -> None:
        """`devices` counts per node, or is given by label. `node_labels`: more labels of each node, in their order."""
        own = [*node_labels, *[()] * (num_nodes - len(node_labels))]
        self._nodes = [Node(node_id=f"node{n}", labels=labels.union(own[n])) for n in range(num_nodes)]
        by_node = devices_of_nodes(devices, self._nodes)
        self._devices = [
            replace(device, node_id=node.node_id)
            for node in self._nodes
            for device in local_devices(by_node[node.node_id], labels=node.labels)
        ]
        self._start: dict[str, Callable[[], LocalNode]] = {}
        self._sessions: list[Session] = []

    def open(
        self,
        session: Session,
        preload: tuple[str, ...],
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str, str], None],
    ) -> Opened:
        for node in self._nodes[1:]:
            self._sessions.append(open_session(f"{session.session_id}-{node.node_id}"))
        for node, own in zip(self._nodes, [session, *self._sessions], strict=True):
            self._start[node.node_id] = partial(
                LocalNode,
                node,
                session_id=own.session_id,
                session_dir=str(own.session_dir),
                shm_dir=str(own.shm_dir),
                preload=preload,
                on_event=on_event,
                on_lost=partial(on_lost, node.node_id),
            )
        return Opened([start() for start in self._start.values()], self._devices)

    def reopen(self, node_id: str) -> NodeClient:
        return self._start[node_id]()

    def close(self) -> None:
        """Remove the folders of nodes other than the driver's, which the cluster removes."""
        for session in self._sessions:
            session.close()
