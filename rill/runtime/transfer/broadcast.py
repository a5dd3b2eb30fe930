"""What the ranks of a group do together without torch.distributed: hand one object to all, agree on a meeting place.

Collectives over tensors belong to torch.distributed; `rendezvous` gives its ranks what they need to find each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rill.errors import UserError
from rill.runtime.process.mailbox import free_port
from rill.runtime.transfer.pending import DEFAULT_WAIT_S, Pending

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

_TAG = "\0broadcast"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What torch.distributed.init_process_group needs."""

    init_method: str
    rank: int
    """The place among the group's ranks, from 0 without gaps."""
    world_size: int


def broadcast(
    context: RuntimeContext,
    obj: Any,
    ranks: Sequence[int],
    *,
    source: int,
    timeout_s: float = DEFAULT_WAIT_S,
) -> Any:
    """Called by every rank of a group; gives each what rank `source` gave. Written once per node."""
    group, rank, transfer = context.address.group, context.address.rank, context.transfer
    _check_source(group, ranks, source)
    if rank != source:
        return transfer.recv(group, source, tag=_TAG, timeout_s=timeout_s)
    if transfer.is_busy((group, rank, _TAG)):  # keep the order of what was given before
        return broadcast_async(context, obj, ranks, source=source).wait(timeout_s)
    transfer.send_to_all(obj, _others(group, ranks, source), _TAG, timeout_s)
    return obj


def broadcast_async(context: RuntimeContext, obj: Any, ranks: Sequence[int], *, source: int) -> Pending[Any]:
    """The same, without waiting: `obj` must not be changed before the result is there."""
    group, rank, transfer = context.address.group, context.address.rank, context.transfer
    _check_source(group, ranks, source)
    if rank != source:
        return transfer.recv_async(group, source, tag=_TAG)

    def give() -> Any:
        transfer.send_to_all(obj, _others(group, ranks, source), _TAG, DEFAULT_WAIT_S)
        return obj

    return transfer.later((group, rank, _TAG), "broadcast", group, give)


def rendezvous(context: RuntimeContext, ranks: Sequence[int], *, timeout_s: float) -> Rendezvous:
    """The first rank picks a free port on its node and tells the others."""
    place = ranks.index(context.address.rank)
    endpoint = f"tcp://{context.host}:{free_port(context.host)}" if place == 0 else ""
    if len(ranks) > 1:
        endpoint = broadcast(context, endpoint, ranks, source=ranks[0], timeout_s=timeout_s)
    return Rendezvous(endpoint, place, len(ranks))


def _check_source(group: str, ranks: Sequence[int], source: int) -> None:
    if source not in ranks:
        raise UserError(f"{group} has ranks {', '.join(map(str, ranks))}: rank {source} cannot broadcast")


def _others(group: str, ranks: Sequence[int], source: int) -> list[tuple[str, int]]:
    return [(group, rank) for rank in ranks if rank != source]
