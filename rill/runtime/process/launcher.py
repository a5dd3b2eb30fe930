"""What a cluster's processes are told at their start: the requests that go to the agents.

`Cluster` decides what runs where and when; this file knows what each kind of process needs.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rill.runtime.context import RuntimeContext
from rill.runtime.device.device import Device, Node, gpus_of, torch_device, visible_devices_env
from rill.runtime.device.placement import Seat
from rill.runtime.hub.server import hub_command
from rill.runtime.process.agent_client import NodeClient
from rill.runtime.process.agent_protocol import Start
from rill.runtime.process.main_module import describe_main
from rill.runtime.process.threads import thread_env
from rill.runtime.process.worker_main import HostSpec
from rill.runtime.transfer.store_host import StoreHostSpec
from rill.runtime.worker import Seating

HUB_KEY = "hub"
STORE_KEY = "store-"
"""Followed by the node's id. Names of groups are followed by a rank in brackets: none is mistaken for a service."""


def is_service(key: str) -> bool:
    """Whether a process is one of the cluster's own, which its agent starts again when it ends."""
    return key == HUB_KEY or (key.startswith(STORE_KEY) and "[" not in key)


class Launcher:
    """Makes start requests for one session. `context` is the driver's."""

    def __init__(
        self, context: RuntimeContext, *, hub_tcp: str, log_dir: Path, trace_dir: str | None
    ) -> None:
        self._context = context
        self._hub_tcp = hub_tcp
        self._log_dir = log_dir
        self._trace_dir = trace_dir
        self._main = describe_main()
        self._socket_numbers = itertools.count(1)

    def hub(self) -> Start:
        """The control plane, on the driver's node."""
        context = self._context
        command = hub_command(
            context.session_dir, context.hub_endpoint, tcp=self._hub_tcp, shm_dir=context.shm_dir
        )
        return Start(
            key=HUB_KEY,
            entry="",
            argv=tuple(command),
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            log_path=str(self._log_dir / "hub.log"),
            restart=True,
        )

    def store_server(self, client: NodeClient) -> Start:
        """A process per node serves its payloads to the others, so that no worker's death loses them."""
        spec = StoreHostSpec(
            session_id=self._context.session_id,
            session_dir=client.session_dir,
            shm_dir=client.shm_dir,
            node_id=client.node.node_id,
            host=client.node.host,
            num_nodes=self._context.num_nodes,
            key=self._context.key,
            hub_endpoint=self._hub_endpoint_for(client.node),
        )
        return Start(
            key=f"{STORE_KEY}{client.node.node_id}",
            entry="rill.runtime.transfer.store_host:main",
            payload=pickle.dumps(spec),
            log_path=self._log_path(client, "store.log"),
            restart=True,
        )

    def worker(
        self,
        client: NodeClient,
        key: str,
        seats: Sequence[Seat],
        *,
        group: str,
        world_size: int,
        incarnation: int,
        num_threads: int,
        peers: Sequence[Device],
        env: Mapping[str, str],
    ) -> Start:
        """One process of a group, with a rank on each of `seats`; it sees `peers` beside their devices."""
        own = [device for seat in seats for device in seat.devices]
        gpus = gpus_of([*own, *peers])
        seatings = [
            Seating(
                group_name=group,
                rank=seat.rank,
                world_size=world_size,
                devices=seat.devices,
                device=torch_device(seat.devices, gpus),
            )
            for seat in seats
        ]
        spec = HostSpec(
            session_id=self._context.session_id,
            session_dir=client.session_dir,
            shm_dir=client.shm_dir,
            node_id=client.node.node_id,
            host=client.node.host,
            num_nodes=self._context.num_nodes,
            key=self._context.key,
            hub_endpoint=self._hub_endpoint_for(client.node),
            driver=self._context.address,
            seatings=tuple(seatings),
            gpus=gpus,
            own_gpus=frozenset(gpus_of(own)),
            incarnation=incarnation,
            num_threads=num_threads,
            main=self._main,
            sys_path=list(sys.path),
            trace_dir=self._trace_dir,
            report_dir=str(self._context.report_dir) if self._context.report_dir is not None else None,
            socket_name=f"w{next(self._socket_numbers)}",
        )
        return Start(
            key=key,
            entry="rill.runtime.process.worker_main:main",
            payload=pickle.dumps(spec),
            env={**visible_devices_env(gpus, own), **thread_env(num_threads, env)},
            log_path=self._log_path(client, f"{group}-{seats[0].rank}-{incarnation}.log"),
        )

    def _hub_endpoint_for(self, node: Node) -> str:
        return self._context.hub_endpoint if node.node_id == self._context.node_id else self._hub_tcp

    def _log_path(self, client: NodeClient, name: str) -> str:
        if client.node.node_id == self._context.node_id:
            return str(self._log_dir / name)
        return str(Path(client.session_dir) / "logs" / name)
