"""What a cluster's processes are told at their start: the requests that go to the agents.

`Cluster` and `Supervisor` decide what runs where and when; this file knows what each kind of process needs.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from rill.runtime.address import STORE_GROUP, Site
from rill.runtime.context import RuntimeContext
from rill.runtime.device.device import torch_device, visible_devices_env
from rill.runtime.process.agent import Start
from rill.runtime.process.backend import NodeClient
from rill.runtime.process.main_module import MainModule, describe_main
from rill.runtime.process.members import Member
from rill.runtime.process.threads import thread_env
from rill.runtime.process.worker_main import WorkerSpec

HUB_KEY = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Makes start requests for one session. `context` is the driver's."""

    context: RuntimeContext
    hub_tcp: str
    log_dir: Path
    trace_dir: str | None
    _main: MainModule = field(default_factory=describe_main)

    def hub(self) -> Start:
        return Start(
            key=HUB_KEY,
            entry="rill.runtime.hub.server:main",
            payload=pickle.dumps((self.context.site, self.hub_tcp)),
            log_path=str(self.log_dir / "hub.log"),
            restart=True,
        )

    def store_server(self, client: NodeClient) -> Start:
        """A process per node serves its payloads to the others, so that no worker's death loses them."""
        return Start(
            key=f"{STORE_GROUP}{client.node.node_id}",
            entry="rill.runtime.transfer.store:main",
            payload=pickle.dumps(self._site_of(client)),
            log_path=self._log_path(client, "store.log"),
            restart=True,
        )

    def worker(self, client: NodeClient, member: Member, ranks: tuple[int, ...], num_threads: int) -> Start:
        address, devices = member.address, member.seat.devices
        spec = WorkerSpec(
            site=self._site_of(client),
            driver=self.context.address,
            address=address,
            ranks=ranks,
            devices=devices,
            device=torch_device(devices),
            num_threads=num_threads,
            main=self._main,
            sys_path=list(sys.path),
            trace_dir=self.trace_dir,
        )
        return Start(
            key=address.identity,
            entry="rill.runtime.process.worker_main:main",
            payload=pickle.dumps(spec),
            env={**visible_devices_env(devices), **thread_env(num_threads, member.group.env)},
            log_path=self._log_path(client, f"{address.group}-{address.rank}-{address.incarnation}.log"),
        )

    def _site_of(self, client: NodeClient) -> Site:
        here = self.context.site
        is_here = client.node.node_id == here.node_id
        return replace(
            here,
            session_dir=Path(client.session_dir),
            shm_dir=Path(client.shm_dir),
            node_id=client.node.node_id,
            host=client.node.host,
            hub_endpoint=here.hub_endpoint if is_here else self.hub_tcp,
        )

    def _log_path(self, client: NodeClient, name: str) -> str:
        if client.node.node_id == self.context.site.node_id:
            return str(self.log_dir / name)
        return str(Path(client.session_dir) / "logs" / name)
