"""Collectives: process groups of torch.distributed that are apart from whatever else the program does with it.

The ranks of a group meet with `rendezvous`, and give its address to torch.distributed or to anything that wants one.
`open_group` and `broadcast_tensor` serve those who need a group of their own, such as weights between machines. torch
enters when they are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rill.runtime.process.mailbox import free_port

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext


@dataclass(frozen=True, slots=True)
class Rendezvous:
    init_method: str
    rank: int
    """The place among the group's ranks, from 0 without gaps."""
    world_size: int


def rendezvous(context: RuntimeContext, ranks: Sequence[int], *, timeout_s: float) -> Rendezvous:
    """Called by every rank of a group. The first picks a free port on its node and tells the others."""
    place = ranks.index(context.address.rank)
    endpoint = f"tcp://{context.site.host}:{free_port(context.site.host)}" if place == 0 else ""
    if len(ranks) > 1:
        endpoint = context.transfer.broadcast(endpoint, ranks, source=ranks[0], timeout_s=timeout_s)
    return Rendezvous(endpoint, place, len(ranks))


def open_store(host: str, port: int, *, is_master: bool, timeout_s: float) -> Any:
    """Where the members of groups find each other; the master's process holds it. RuntimeError where it cannot."""
    distributed = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=timeout_s)
    return distributed.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


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
