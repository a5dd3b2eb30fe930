"""Who this process is in a run: its session, its node, its address and its doors to the rest.

One per process, made before user code runs: by `Cluster` in the driver (group "driver", rank 0) and by the worker's
main in a worker. Everything that a channel, a lock or a transfer needs to know about its surroundings is read from
`current()`. It hears nothing before `mailbox.start()`.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rill.errors import RunError
from rill.runtime.address import Site, WorkerAddress
from rill.runtime.handle import Handle
from rill.runtime.hub.client import HubClient
from rill.runtime.hub.history import Recorder
from rill.runtime.process.call import Calls
from rill.runtime.process.directory import Directory
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.process.report import answer_dumps, late
from rill.runtime.transfer.parcel import Parcels
from rill.runtime.transfer.point_to_point import PointToPoint
from rill.runtime.transfer.wire import Encoded

if TYPE_CHECKING:
    from rill.runtime.channels.consumer import Consumer
    from rill.runtime.device.lock import DeviceLock
    from rill.runtime.transfer.store import Store


class RuntimeContext:
    """The doors of one process."""

    def __init__(self, site: Site, address: WorkerAddress, *, torch_device: str | None = None) -> None:
        """`address`: who this is; where it can be reached is added. `torch_device`: where tensors that were on a GPU at
        the sender are put; None: on the CPU. Nothing waits for the hub, which may be starting."""
        self.site = site
        # A short name, because the path of a Unix socket may have 107 characters.
        endpoint = f"ipc://{site.session_dir}/{secrets.token_hex(4)}"
        self.mailbox = Mailbox(endpoint, host=site.host, key=site.key)
        tcp_endpoint = self.mailbox.tcp_endpoint
        self.address = replace(address, pid=os.getpid(), endpoint=endpoint, tcp_endpoint=tcp_endpoint)
        self.torch_device = torch_device
        self.channels: dict[str, Consumer] = {}
        """Of the channels that were used here, by name; each has its producer."""
        self.device_lock: DeviceLock | None = None
        """This worker's turn on its devices, once it has asked for one."""
        self.lock = threading.RLock()
        self._store: Store | None = None
        self.late = functools.partial(late, self)
        """Makes the error of a handle's deadline."""
        self.hub = HubClient(site.hub_endpoint, self.address.identity, site.key, self.address)
        self.recorder = Recorder(self.address.group, self.address.rank, self.hub)
        self.directory = Directory(self)
        self.parcels = Parcels(self)
        self.calls = Calls(self)
        """The remote calls that this process waits for."""
        self.transfer = PointToPoint(self)
        answer_dumps(self)
        self.hub.start()

    @property
    def store(self) -> Store:
        """This process's client of the payload store, opened at its first use: it needs numpy."""
        if self._store is None:
            from rill.runtime.transfer.store import open_store

            with self.lock:
                self._store = self._store or open_store(self)
        return self._store

    def call(
        self,
        group: str,
        method: str,
        targets: Sequence[WorkerAddress],
        arguments: Encoded,
        *,
        concurrent: bool = False,
    ) -> Handle:
        handle = Handle(f"{group}.{method}", targets, self.late)
        payload = self.parcels.pack(arguments, (target.identity for target in targets))
        self.calls.call(handle, method, payload, concurrent=concurrent)
        return handle

    def close(self) -> None:
        with self.lock:
            lock, self.device_lock = self.device_lock, None
            consumers = list(self.channels.values())
            self.channels.clear()
        for used in (*consumers, lock, self._store):
            if used is not None:
                used.close()
        for door in (self.transfer, self.directory, self.recorder, self.hub, self.mailbox, self.calls):
            door.close()


_of_process: list[RuntimeContext] = []


def current() -> RuntimeContext:
    if not _of_process:
        raise RunError(
            "no cluster is open here: it was closed, or none was made (`with Cluster(...) as cluster`)"
        )
    return _of_process[-1]


def is_set() -> bool:
    return bool(_of_process)


def install(context: RuntimeContext) -> None:
    """Make `context` the process's own. Clusters may be nested: the innermost counts."""
    _of_process.append(context)


def uninstall(context: RuntimeContext) -> None:
    if context in _of_process:
        _of_process.remove(context)
