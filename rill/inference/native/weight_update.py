"""Copies new weights into the runner's parameters by name, and proves that all of them came."""

from __future__ import annotations

import torch

from rill.errors import WeightSyncError
from rill.inference.base import NamedTensors
from rill.inference.native.model_runner import ModelRunner


@torch.no_grad()
def copy_weights(runner: ModelRunner, tensors: NamedTensors, *, partial: bool) -> int:
    """Returns the number of bytes taken. Raises WeightSyncError at the first tensor that does not belong."""
    targets = list(runner.named_targets())
    by_name = {name: target for name, target, _ in targets}
    missing = {target.data_ptr(): name for name, target, is_required in targets if is_required}
    num_bytes = 0
    sources: list[torch.Tensor] = []
    destinations: list[torch.Tensor] = []
    for name, tensor in tensors:
        target = by_name.get(name)
        if target is None:
            raise WeightSyncError(
                f"the update brings {name!r}, which the model does not have: "
                f"its names look like {next(iter(by_name))!r}"
            )
        if tensor.shape != target.shape:
            raise WeightSyncError(
                f"{name} arrived with shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}: "
                "send full, unsharded tensors"
            )
        # A tied tensor may come under each of its names; the storage identifies it.
        missing.pop(target.data_ptr(), None)
        num_bytes += tensor.numel() * tensor.element_size()
        if tensor.device == target.device and tensor.dtype == target.dtype:
            sources.append(tensor.detach())
            destinations.append(target)
            if len(sources) == 256:
                torch._foreach_copy_(destinations, sources)
                sources, destinations = [], []
        else:
            target.copy_(tensor.detach(), non_blocking=True)
    if sources:
        torch._foreach_copy_(destinations, sources)
    if missing and not partial:
        names = sorted(missing.values())
        raise WeightSyncError(
            f"the update lacks {len(names)} of {len(by_name)} parameters, {names[0]!r} first: "
            "send all of them, or say partial=True"
        )
    return num_bytes
