"""Collectives: process groups of torch.distributed that are apart from whatever else the program does with it.

The ranks of a group meet with `rendezvous`, and give the store that it opens to torch.distributed. `open_group` and
`broadcast_tensor` serve those who need a group of their own, such as weights between machines. torch enters when a
store is opened.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext


@dataclass(frozen=True, slots=True)
class Rendezvous:
    host: str
    port: int
    rank: int
    """The place among the group's ranks, from 0 without gaps."""
    world_size: int
    listener: socket.socket | None
    """The first rank's: it listens from the moment the port is known, so nobody else gets it."""

    def open_store(self, timeout_s: float) -> Any:
        """What torch.distributed.init_process_group takes as `store`; once per rank. `timeout_s`: see `open_store`."""
        is_master = self.rank == 0
        return open_store(
            self.host, self.port, is_master=is_master, timeout_s=timeout_s, listener=self.listener
        )


def rendezvous(context: RuntimeContext, ranks: Sequence[int], *, timeout_s: float) -> Rendezvous:
    """Called by every rank of a group. The first listens on a free port of its node and tells the others."""
    place = ranks.index(context.address.rank)
    listener = socket.create_server((context.site.host, 0)) if place == 0 else None
    where = (context.site.host, listener.getsockname()[1] if listener is not None else 0)
    if len(ranks) > 1:
        where = context.transfer.broadcast(where, ranks, source=ranks[0], timeout_s=timeout_s)
    return Rendezvous(*where, place, len(ranks), listener)


def open_store(
    host: str, port: int, *, is_master: bool, timeout_s: float, listener: socket.socket | None = None
) -> Any:
    """Where the members of groups find each other; the master's process holds it. RuntimeError where it cannot.
    `timeout_s`: of finding it, and of each wait for what another member writes. `listener`: what the master hears on,
    where it listens on `port` already; the store closes it."""
    distributed = importlib.import_module("torch.distributed")
    return distributed.TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def open_group(backend: str, store: Any, rank: int, world_size: int, *, name: str, timeout_s: float) -> Any:
    """A process group of its own: "gloo" moves CPU tensors, "nccl" those of GPUs. `name`: the group's, in the store."""
    distributed = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=timeout_s)
    members = distributed.PrefixStore(name, store)
    if backend == "gloo":
        return distributed.ProcessGroupGloo(members, rank, world_size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(members, rank, world_size, options)


def broadcast_tensor(group: Any, tensor: Any, *, root: int, timeout_s: float) -> None:
    """Every member of the group calls it; each tensor is then as the root's. RuntimeError past the deadline."""
    distributed = importlib.import_module("torch.distributed")
    options = distributed.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    group.broadcast([tensor], options).wait(timedelta(seconds=timeout_s))
