"""What data ranks read apart, dealt out anew so that every rank has alike work to do.

Callers: SFTTrainer and the pair trainers. RL needs none of it: its samples wait in channels, and each rank takes what
the plan gives it.

    every rank   costs ──all-gather──> partition, the same on all ──all-to-all──> its share
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from rill.training.balance import imbalance, partition
from rill.training.parallel import World

Item = TypeVar("Item")


def deal_out(items: Sequence[Item], costs: Sequence[float], world: World) -> tuple[list[Item], float]:
    """(this data rank's share of all that the ranks pass in, how much the costliest rank exceeds the mean).

    The share is in the order of ranks, then of their items. A collective over data ranks.
    """
    if world.mesh is None or world.data_size == 1:
        return list(items), 0.0
    all_costs: list[list[float]] = [[] for _ in range(world.data_size)]
    dist.all_gather_object(all_costs, list(costs), group=world.mesh.get_group("data"))
    owners = [(rank, index) for rank, own in enumerate(all_costs) for index in range(len(own))]
    flat = [cost for own in all_costs for cost in own]
    parts = partition(flat, world.data_size)
    outgoing = [
        [items[index] for rank, index in (owners[i] for i in part) if rank == world.data_rank]
        for part in parts
    ]
    incoming = _all_to_all([pickle.dumps(mine) for mine in outgoing], world)
    return [item for data in incoming for item in pickle.loads(data)], imbalance(flat, parts)


def _all_to_all(outgoing: Sequence[bytes], world: World) -> list[bytes]:
    """Bytes for every data rank in; the bytes from every data rank out."""
    assert world.mesh is not None
    group = world.mesh.get_group("data")
    sent = torch.tensor([len(data) for data in outgoing], device=world.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = received.tolist()
    inbox = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
    outbox = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8).to(world.device)
    dist.all_to_all_single(inbox, outbox, sizes, sent.tolist(), group=group)
    return [part.numpy().tobytes() for part in torch.split(inbox.cpu(), sizes)]
