"""What a cluster needs from a place to run: nodes to start processes on, and their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rill.runtime.device import LOCAL_NODE, Device, Node, local_devices
from rill.runtime.local import LocalNode, NodeClient
from rill.runtime.process import Event
from rill.runtime.session import Session


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
    """This machine."""

    def __init__(self, devices: str | int | Sequence[Device], labels: frozenset[str]) -> None:
        self._devices = local_devices(devices, labels=labels)
        self._node = Node(node_id=LOCAL_NODE, labels=labels)
        self._start: Callable[[], LocalNode] | None = None

    def open(
        self,
        session: Session,
        preload: tuple[str, ...],
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str, str], None],
    ) -> Opened:
        self._start = lambda: LocalNode(
            self._node,
            session_id=session.session_id,
            session_dir=str(session.session_dir),
            shm_dir=str(session.shm_dir),
            preload=preload,
            on_event=on_event,
            on_lost=lambda reason: on_lost(LOCAL_NODE, reason),
        )
        return Opened([self._start()], self._devices)

    def reopen(self, node_id: str) -> NodeClient:
        assert self._start is not None and node_id == LOCAL_NODE
        return self._start()

    def close(self) -> None:
        """Nothing beside the agent was taken."""
