"""The node that this process runs on: its agent, started as a child.

`Cluster` uses one for the local backend; the Ray backend runs one inside an actor on every node. Requests go to
the agent over a socketpair; its events come back through `on_event`, called from this object's reader thread.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rill.errors import RunError
from rill.runtime.device.device import Device, Node, on_node
from rill.runtime.process.agent import AgentSpec, Exited, Start, bootstrap, receive_message, send_message
from rill.runtime.process.session import Session

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
