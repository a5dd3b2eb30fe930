"""Who this process is in a run: its session, its node, its address and its doors to the rest.

One per process, set before user code runs: by `Cluster` in the driver (group "driver", rank 0) and by the
worker's main in a worker. Ranks that share a process have one each, found through the thread (or task) that runs
them; the first of them, the lead, holds the doors that a process needs once. Everything that a channel, a lock or a
transfer needs to know about its surroundings is read from `current()`.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rill.errors import RunError

if TYPE_CHECKING:
    from rill.runtime.channels.ends import ChannelEnds
    from rill.runtime.channels.recorder import Recorder
    from rill.runtime.hub.server import HubClient
    from rill.runtime.process.call import CallBook
    from rill.runtime.process.directory import Directory
    from rill.runtime.process.mailbox import Inbox
    from rill.runtime.process.session_key import SessionKey
    from rill.runtime.transfer.parcel import Parcels
    from rill.runtime.transfer.point_to_point import PointToPoint

DRIVER_GROUP = "driver"


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a process of the run can be reached. A relaunched rank has a new one."""

    group: str
    rank: int
    node_id: str
    pid: int
    endpoint: str
    """The mailbox that processes of the same node send to (ipc)."""
    tcp_endpoint: str = ""
    """The mailbox that processes of other nodes send to. Empty where the run has one node."""
    raw_endpoint: str = ""
    """Where processes of other nodes send raw bytes, unencrypted. Empty where the run has one node."""
    incarnation: int = 0
    """Counts the launches of this rank, from 0."""
    gpus: tuple[int, ...] = ()
    """The GPUs that this process sees, by their numbers on the node; its cuda:0 is the first."""
    lead: int = -1
    """The first rank of the process that this one shares with others; -1: its process is its own."""

    @property
    def name(self) -> str:
        """As errors and logs write it: "rollout[3]"."""
        return f"{self.group}[{self.rank}]"

    @property
    def identity(self) -> str:
        """Unique in the session and never used again."""
        return f"{self.group}[{self.rank}]#{self.incarnation}"

    @property
    def process_identity(self) -> str:
        """The identity of its process's first rank: equal for ranks that share a process."""
        return self.identity if self.lead < 0 else f"{self.group}[{self.lead}]#{self.incarnation}"

    def endpoint_from(self, node_id: str) -> str:
        """The endpoint that a process on `node_id` connects to."""
        return self.endpoint if node_id == self.node_id else self.tcp_endpoint


@dataclass(slots=True)
class RuntimeContext:
    """The doors of one process, or of one rank of a process that several share."""

    session_id: str
    session_dir: Path
    """Sockets, logs and the session's lock file, under the system's temporary directory."""
    shm_dir: Path
    """Shared-memory files of this session on this node; whoever survives removes it with everything in it."""
    node_id: str
    address: WorkerAddress
    hub_endpoint: str
    mailbox: Inbox
    """What is sent here arrives in it."""
    calls: CallBook
    """The remote calls that this process waits for."""
    host: str = "127.0.0.1"
    """The address of this node that other nodes can reach."""
    num_nodes: int = 1
    key: SessionKey | None = None
    """What lets this process in at other nodes. None where the run has one node."""
    torch_device: str | None = None
    """Where tensors that were on a GPU at the sender are put. None: on the CPU."""
    own_gpus: frozenset[int] = frozenset()
    """Of the GPUs that this process sees, those that are its own, by their numbers on the node."""
    report_dir: Path | None = None
    """Where a stuck-run report is written: a folder that outlives the session. None: the user's under the system's
    temporary directory."""
    lead: RuntimeContext | None = None
    """The first rank of a shared process, whose store, parcels, directory and calls this rank uses."""
    registration: dict[str, Any] | None = None
    """What the hub is told about this rank when its line to the hub opens."""
    services: dict[str, Any] = field(default_factory=dict)
    """Doors that are opened at first use and closed with the process, by name."""
    channels: dict[str, ChannelEnds] = field(default_factory=dict)
    """The ends of channels that were used here, by name."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def recorder(self) -> Recorder:
        """What this process's calls do."""
        recorder: Recorder = self._service("recorder", _open_recorder)
        return recorder

    @property
    def hub(self) -> HubClient:
        """This rank's client of the control plane."""
        hub: HubClient = self._service("hub", _open_hub)
        return hub

    @property
    def store(self) -> Any:
        """This process's client of the payload store."""
        return self.lead.store if self.lead is not None else self._service("store", _open_store)

    @property
    def directory(self) -> Directory:
        """Where the other processes are, and which are gone."""
        if self.lead is not None:
            return self.lead.directory
        directory: Directory = self._service("directory", _open_directory)
        return directory

    @property
    def parcels(self) -> Parcels:
        """Packs objects for other processes of the node."""
        if self.lead is not None:
            return self.lead.parcels
        parcels: Parcels = self._service("parcels", _open_parcels)
        return parcels

    @property
    def transfer(self) -> PointToPoint:
        """Point-to-point transfer between workers."""
        transfer: PointToPoint = self._service("transfer", _open_transfer)
        return transfer

    def open(self) -> None:
        """Open the doors that others knock at: from now on this process hears of deaths and can be sent to."""
        if self.lead is None:
            parcels = self.parcels
            self.calls.unpack = lambda frames: parcels.unpack(frames, device=self._caller_device())
            self.directory.on_death(self.calls.peer_died)
            self.directory.on_death(lambda identity, _: self.parcels.peer_died(identity))
        assert self.transfer is not None

    def close(self) -> None:
        """Close the doors in the opposite order of their opening."""
        with self.lock:
            opened = [*self.services.values(), *self.channels.values()]
            self.services.clear()
            self.channels.clear()
        for service in reversed(opened):
            service.close()

    def _caller_device(self) -> str | None:
        """Where GPU tensors of a call's results go: the device of the rank that asks, which may share this process."""
        rank = _of_thread.get()
        return (rank or self).torch_device

    def _service(self, name: str, opener: Any) -> Any:
        with self.lock:
            if name not in self.services:
                self.services[name] = opener(self)
            return self.services[name]


def _open_hub(context: RuntimeContext) -> Any:
    from rill.runtime.hub.server import HubClient

    client = HubClient(context.hub_endpoint, context.address.identity, context.key)
    if context.registration is not None:
        client.submit(
            "registry.register", context.registration
        )  # does not wait: the hub may still be starting
    return client


def _open_recorder(context: RuntimeContext) -> Any:
    from rill.runtime.channels.recorder import Recorder

    return Recorder(context.address.group, context.address.rank, context.hub)


def _open_store(context: RuntimeContext) -> Any:
    from rill.runtime.transfer.store import open_store

    return open_store(context)


def _open_directory(context: RuntimeContext) -> Any:
    from rill.runtime.process.directory import Directory

    return Directory(context, follows_hub=context.address.group != DRIVER_GROUP)


def _open_parcels(context: RuntimeContext) -> Any:
    from rill.runtime.transfer.parcel import Parcels

    return Parcels(context)


def _open_transfer(context: RuntimeContext) -> Any:
    from rill.runtime.transfer.point_to_point import PointToPoint

    return PointToPoint(context)


# --- the current one --------------------------------------------------------------------------------------

_of_thread: ContextVar[RuntimeContext | None] = ContextVar("rill-rank", default=None)
"""Set in the threads of ranks that share a process. A ContextVar, so that tasks and asyncio.to_thread inherit it."""
_of_process: list[RuntimeContext] = []


def current() -> RuntimeContext:
    """The context of the rank that this thread or task works for, else of this process."""
    context = _of_thread.get()
    if context is not None:
        return context
    if not _of_process:
        raise RunError(
            "there is no cluster here: create one first (`with Cluster(...) as cluster`); in a process that several"
            " ranks share, start threads with `contextvars.copy_context().run`, so that they know their rank"
        )
    return _of_process[-1]


def is_set() -> bool:
    """Whether `current()` has an answer."""
    return _of_thread.get() is not None or bool(_of_process)


def install(context: RuntimeContext) -> None:
    """Make `context` the process's own. Clusters may be nested: the innermost counts."""
    _of_process.append(context)


def uninstall(context: RuntimeContext) -> None:
    """Undo `install`."""
    if context in _of_process:
        _of_process.remove(context)


def install_for_thread(context: RuntimeContext) -> None:
    """Make `context` that of the calling thread."""
    _of_thread.set(context)
