"""Who this process is in a run: its session, its node, its address and its doors to the rest.

One per process, set before user code runs: by `Cluster` in the driver (group "driver", rank 0) and by the worker's main
in a worker. Everything that a channel, a lock or a transfer needs to know about its surroundings is read from
`current()`. Doors open at their first use and close with the process, in the opposite order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rill.errors import RunError
from rill.runtime.address import DRIVER_GROUP, Site, WorkerAddress
from rill.runtime.process.call import Calls
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.process.waits import answer_dumps

if TYPE_CHECKING:
    from rill.runtime.channel import ChannelEnds
    from rill.runtime.channels.recorder import Recorder
    from rill.runtime.device.lock import DeviceLock
    from rill.runtime.hub.client import HubClient
    from rill.runtime.process.directory import Directory
    from rill.runtime.transfer.parcel import Parcels
    from rill.runtime.transfer.point_to_point import PointToPoint
    from rill.runtime.transfer.store import Store


D = TypeVar("D")


class _opened_once(Generic[D]):  # noqa: N801  used as a decorator
    """A property that is made at its first use, under the context's lock, and lies in the instance from then on."""

    def __init__(self, open_door: Callable[[Any], D]) -> None:
        self._open = open_door
        self._name = open_door.__name__
        self.__doc__ = open_door.__doc__

    def __get__(self, context: RuntimeContext, owner: type) -> D:
        with context.lock:
            if self._name not in context.__dict__:
                door = context.__dict__[self._name] = self._open(context)
                context.doors.append(door)
            made: D = context.__dict__[self._name]
            return made


class RuntimeContext:
    """The doors of one process."""

    def __init__(
        self,
        site: Site,
        address: WorkerAddress,
        socket_name: str,
        *,
        torch_device: str | None = None,
        registration: Mapping[str, Any] | None = None,
    ) -> None:
        """`address`: who this is; where it can be reached is added. `socket_name`: of its mailbox, in the session's
        folder. `torch_device`: where tensors that were on a GPU at the sender are put; None: on the CPU.
        `registration`: what the hub is told besides the address when this process's line to it opens."""
        self.site = site
        endpoint = f"ipc://{site.session_dir}/{socket_name}"
        self.mailbox = Mailbox(endpoint, tcp_host=site.host if site.key is not None else None, key=site.key)
        tcp_endpoint = self.mailbox.tcp_endpoint
        self.address = replace(address, pid=os.getpid(), endpoint=endpoint, tcp_endpoint=tcp_endpoint)
        self.calls = Calls(self.mailbox, self.address)
        """The remote calls that this process waits for."""
        self.torch_device = torch_device
        self._registration = {**(registration or {}), "address": astuple(self.address)}
        self.channels: dict[str, ChannelEnds] = {}
        """The ends of channels that were used here, by name."""
        self.device_lock: DeviceLock | None = None
        """This worker's turn on its devices, once it has asked for one."""
        self.lock = threading.RLock()
        self.doors: list[Any] = []
        """What was opened here, in that order, and is closed with the process."""

    @_opened_once
    def hub(self) -> HubClient:
        """This process's client of the control plane."""
        from rill.runtime.hub.client import HubClient

        hub = HubClient(self.site.hub_endpoint, self.address.identity, self.site.key)
        hub.submit("registry.register", self._registration)  # does not wait: the hub may still be starting
        return hub

    @_opened_once
    def recorder(self) -> Recorder:
        """What this process's calls do."""
        from rill.runtime.channels.recorder import Recorder

        return Recorder(self.address.group, self.address.rank, self.hub)

    @_opened_once
    def store(self) -> Store:
        """This process's client of the payload store."""
        from rill.runtime.transfer.store import open_store

        return open_store(self)

    @_opened_once
    def directory(self) -> Directory:
        """Where the other processes are, and which are gone."""
        from rill.runtime.process.directory import Directory

        return Directory(self, follows_hub=self.address.group != DRIVER_GROUP)

    @_opened_once
    def parcels(self) -> Parcels:
        """Packs objects for other processes of the node."""
        from rill.runtime.transfer.parcel import Parcels

        return Parcels(self)

    @_opened_once
    def transfer(self) -> PointToPoint:
        """Point-to-point transfer between workers."""
        from rill.runtime.transfer.point_to_point import PointToPoint

        return PointToPoint(self)

    def open(self) -> None:
        """Open the doors that others knock at: from now on this process hears of deaths and can be sent to."""
        parcels, directory = self.parcels, self.directory
        answer_dumps(self.mailbox, self.address.identity)
        self.calls.unpack = lambda frames: parcels.unpack(frames, device=self.torch_device)
        directory.on_death(self.calls.peer_died)
        directory.on_death(lambda identity, _: parcels.peer_died(identity))
        assert self.transfer is not None

    def close(self) -> None:
        """Close what is open, in the opposite order of its opening."""
        with self.lock:
            lock, self.device_lock = self.device_lock, None
            doors: list[Any] = [*self.channels.values(), *([lock] if lock is not None else ())]
            doors += reversed(self.doors)
            self.channels.clear()
            self.doors.clear()
        for door in (*doors, self.mailbox, self.calls):
            door.close()


_of_process: list[RuntimeContext] = []


def current() -> RuntimeContext:
    """The context of this process."""
    if not _of_process:
        raise RunError(
            "no cluster is open here: it was closed, or none was made (`with Cluster(...) as cluster`)"
        )
    return _of_process[-1]


def is_set() -> bool:
    """Whether `current()` has an answer."""
    return bool(_of_process)


def install(context: RuntimeContext) -> None:
    """Make `context` the process's own. Clusters may be nested: the innermost counts."""
    _of_process.append(context)


def uninstall(context: RuntimeContext) -> None:
    if context in _of_process:
        _of_process.remove(context)
