"""What the ranks of a group do together without torch.distributed: hand one object to all, agree on a meeting place.

Collectives over tensors belong to torch.distributed; `rendezvous` gives its ranks what they need to find each other.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import UserError
from rill.runtime.transfer.pending import DEFAULT_WAIT_S, Pending

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

_TAG = "\0broadcast"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What torch.distributed.init_process_group needs."""

    init_method: str
    rank: int
    world_size: int


def broadcast(
    context: RuntimeContext, obj: Any, world_size: int, *, source: int, timeout_s: float = DEFAULT_WAIT_S
) -> Any:
    """Called by every rank of a group; gives each what rank `source` gave. Written once per node."""
    group, rank, transfer = context.address.group, context.address.rank, context.transfer
    _check_source(group, world_size, source)
    if rank != source:
        return transfer.recv(group, source, tag=_TAG, timeout_s=timeout_s)
    if transfer.is_busy((group, rank, _TAG)):  # keep the order of what was given before
        return broadcast_async(context, obj, world_size, source=source).wait(timeout_s)
    transfer.send_to_all(obj, _others(group, world_size, source), _TAG, timeout_s)
    return obj


def broadcast_async(context: RuntimeContext, obj: Any, world_size: int, *, source: int) -> Pending[Any]:
    """The same, without waiting: `obj` must not be changed before the result is there."""
    group, rank, transfer = context.address.group, context.address.rank, context.transfer
    _check_source(group, world_size, source)
    if rank != source:
        return transfer.recv_async(group, source, tag=_TAG)

    def give() -> Any:
        transfer.send_to_all(obj, _others(group, world_size, source), _TAG, DEFAULT_WAIT_S)
        return obj

    return transfer.later((group, rank, _TAG), "broadcast", group, give)


def rendezvous(context: RuntimeContext, world_size: int, *, timeout_s: float) -> Rendezvous:
    """Rank 0 picks a free port on its node and tells the others."""
    rank = context.address.rank
    endpoint = f"tcp://{context.host}:{free_port(context.host)}" if rank == 0 else ""
    if world_size > 1:
        endpoint = broadcast(context, endpoint, world_size, source=0, timeout_s=timeout_s)
    return Rendezvous(endpoint, rank, world_size)


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _check_source(group: str, world_size: int, source: int) -> None:
    if not 0 <= source < world_size:
        raise UserError(f"{group} has ranks 0 to {world_size - 1}: rank {source} cannot broadcast")


def _others(group: str, world_size: int, source: int) -> list[tuple[str, int]]:
    return [(group, rank) for rank in range(world_size) if rank != source]
