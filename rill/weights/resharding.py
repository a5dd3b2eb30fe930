"""Between the trainer's layout (FSDP, tensor-parallel shards) and an engine's.

The publisher takes full tensors: a DTensor is gathered by all ranks of its mesh, one tensor at a time, so no rank
ever holds a second copy of the model. A tensor-parallel engine asks for its slice of each tensor by a ShardSpec.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from rill.errors import WeightSyncError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Part `rank` of `world` equal parts along `dim`."""

    dim: int
    rank: int
    world: int


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered where it is sharded. Collective: every rank of the mesh must call it."""
    if type(tensor) in (Tensor, Parameter):
        return tensor  # also spares runs without sharding the import below, which takes seconds
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        whole = tensor.full_tensor()
        assert isinstance(whole, Tensor)
        return whole
    return tensor


def shard_of(name: str, whole: Tensor, shards: Mapping[str, ShardSpec]) -> Tensor:
    """The slice that `shards` asks for: an entry's key is a name or a pattern such as "*.q_proj.weight"."""
    spec = shards.get(name)
    if spec is None:
        spec = next((s for pattern, s in shards.items() if fnmatch.fnmatchcase(name, pattern)), None)
    if spec is None:
        return whole
    if not -whole.dim() <= spec.dim < whole.dim() or whole.shape[spec.dim] % spec.world:
        raise WeightSyncError(
            f"{name!r} of shape {tuple(whole.shape)} cannot be cut into {spec.world} equal parts along dim {spec.dim}"
        )
    size = whole.shape[spec.dim] // spec.world
    return whole.narrow(spec.dim, spec.rank * size, size)
