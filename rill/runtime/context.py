"""Who this process is in a run: its session, its node, its address and its doors to the rest.

One per process, set before user code runs: by `Cluster` in the driver (group "driver", rank 0) and by the worker's main
in a worker. Everything that a channel, a lock or a transfer needs to know about its surroundings is read from
`current()`. Doors open at their first use and close with the process, in the opposite order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rill.errors import RunError
from rill.runtime.address import DRIVER_GROUP, Site, WorkerAddress

if TYPE_CHECKING:
    from rill.runtime.channels.ends import ChannelEnds
    from rill.runtime.channels.recorder import Recorder
    from rill.runtime.device.lock import DeviceLock
    from rill.runtime.hub.client import HubClient
    from rill.runtime.process.call import Calls
    from rill.runtime.process.directory import Directory
    from rill.runtime.process.mailbox import Mailbox
    from rill.runtime.process.session_key import SessionKey
    from rill.runtime.transfer.parcel import Parcels
    from rill.runtime.transfer.point_to_point import PointToPoint


class Door(Protocol):
    """Something that is opened once and closed with the process."""

    def close(self) -> None: ...


D = TypeVar("D", bound=Door)


@dataclass(slots=True)
class RuntimeContext:
    """The doors of one process."""

    site: Site
    address: WorkerAddress
    mailbox: Mailbox
    """What is sent here arrives in it."""
    calls: Calls
    """The remote calls that this process waits for."""
    torch_device: str | None = None
    """Where tensors that were on a GPU at the sender are put. None: on the CPU."""
    registration: dict[str, Any] | None = None
    """What the hub is told about this rank when its line to the hub opens."""
    channels: dict[str, ChannelEnds] = field(default_factory=dict)
    """The ends of channels that were used here, by name."""
    device_lock: DeviceLock | None = None
    """This worker's turn on its devices, once it has asked for one."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _opened: list[Door] = field(default_factory=list)
    _hub: HubClient | None = None
    _store: Any = None
    _directory: Directory | None = None
    _parcels: Parcels | None = None
    _transfer: PointToPoint | None = None
    _recorder: Recorder | None = None

    @property
    def shm_dir(self) -> Path:
        return self.site.shm_dir

    @property
    def node_id(self) -> str:
        return self.site.node_id

    @property
    def host(self) -> str:
        return self.site.host

    @property
    def key(self) -> SessionKey | None:
        return self.site.key

    @property
    def recorder(self) -> Recorder:
        """What this process's calls do."""
        with self.lock:
            if self._recorder is None:
                from rill.runtime.channels.recorder import Recorder

                self._recorder = self._keep(Recorder(self.address.group, self.address.rank, self.hub))
            return self._recorder

    @property
    def hub(self) -> HubClient:
        """This process's client of the control plane."""
        with self.lock:
            if self._hub is None:
                from rill.runtime.hub.client import HubClient

                self._hub = self._keep(HubClient(self.site.hub_endpoint, self.address.identity, self.key))
                if self.registration is not None:  # does not wait: the hub may still be starting
                    self._hub.submit("registry.register", self.registration)
            return self._hub

    @property
    def store(self) -> Any:
        """This process's client of the payload store."""
        with self.lock:
            if self._store is None:
                from rill.runtime.transfer.store import open_store

                self._store = self._keep(open_store(self))
            return self._store

    @property
    def directory(self) -> Directory:
        """Where the other processes are, and which are gone."""
        with self.lock:
            if self._directory is None:
                from rill.runtime.process.directory import Directory

                self._directory = Directory(self, follows_hub=self.address.group != DRIVER_GROUP)
            return self._directory

    @property
    def parcels(self) -> Parcels:
        """Packs objects for other processes of the node."""
        with self.lock:
            if self._parcels is None:
                from rill.runtime.transfer.parcel import Parcels

                self._parcels = self._keep(Parcels(self))
            return self._parcels

    @property
    def transfer(self) -> PointToPoint:
        """Point-to-point transfer between workers."""
        with self.lock:
            if self._transfer is None:
                from rill.runtime.transfer.point_to_point import PointToPoint

                self._transfer = self._keep(PointToPoint(self))
            return self._transfer

    def open(self) -> None:
        """Open the doors that others knock at: from now on this process hears of deaths and can be sent to."""
        parcels, directory = self.parcels, self.directory
        self.calls.unpack = lambda frames: parcels.unpack(frames, device=self.torch_device)
        directory.on_death(self.calls.peer_died)
        directory.on_death(lambda identity, _: parcels.peer_died(identity))
        assert self.transfer is not None

    def close(self) -> None:
        """Close what is open, in the opposite order of its opening."""
        with self.lock:
            lock, self.device_lock = self.device_lock, None
            doors: list[Door] = [*self.channels.values(), *([lock] if lock is not None else ())]
            doors += reversed(self._opened)
            self.channels.clear()
            self._opened.clear()
        for door in doors:
            door.close()

    def _keep(self, door: D) -> D:
        self._opened.append(door)
        return door


# --- the current one --------------------------------------------------------------------------------------

_of_process: list[RuntimeContext] = []


def current() -> RuntimeContext:
    """The context of this process."""
    if not _of_process:
        raise RunError("there is no cluster here: create one first (`with Cluster(...) as cluster`)")
    return _of_process[-1]


def is_set() -> bool:
    """Whether `current()` has an answer."""
    return bool(_of_process)


def install(context: RuntimeContext) -> None:
    """Make `context` the process's own. Clusters may be nested: the innermost counts."""
    _of_process.append(context)


def uninstall(context: RuntimeContext) -> None:
    """Undo `install`."""
    if context in _of_process:
        _of_process.remove(context)
