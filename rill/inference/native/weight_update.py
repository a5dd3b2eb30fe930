"""Copies new weights into a model's parameters by name, and proves that all of them came."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rill.errors import WeightSyncError
from rill.inference.base import NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightTargets:
    """Where each name's tensor goes. The walk over the modules is made once; an update finds its targets in a table."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Tied tensors appear under each of their names; one of them is enough.
        self._by_name: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._required = {id(p): name for name, p in reversed(self._by_name.items())}
        self._by_name |= dict(model.named_buffers())

    @torch.no_grad()
    def copy(self, tensors: NamedTensors, *, partial: bool) -> None:
        """Raises WeightSyncError at the first tensor that does not belong.

        A list keeps its tensors alive, so they are copied together. One that comes out of an iterator may be gone once
        the next is asked for, so it is copied first.
        """
        missing = dict(self._required)
        at_once = isinstance(tensors, list | tuple)
        sources: list[torch.Tensor] = []
        destinations: list[torch.Tensor] = []
        for name, tensor in tensors:
            target = self._target(name, tensor)
            missing.pop(id(target), None)
            if at_once and tensor.device == target.device and tensor.dtype == target.dtype:
                sources.append(tensor.detach())
                destinations.append(target.data)
            else:
                target.data.copy_(tensor.detach(), non_blocking=True)
        if sources:
            torch._foreach_copy_(destinations, sources)
        if missing and not partial:
            names = sorted(missing.values())
            raise WeightSyncError(
                f"the update lacks {len(names)} of {len(self._by_name)} parameters, {names[0]!r} first: "
                "send all of them, or say partial=True"
            )

    def _target(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        target = self._by_name.get(name)
        if target is None:
            raise WeightSyncError(
                f"the update brings {name!r}, which the model does not have: "
                f"its names look like {next(iter(self._by_name))!r}"
            )
        if tensor.shape != target.shape:
            raise WeightSyncError(
                f"{name} arrived with shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}: "
                "send full, unsharded tensors"
            )
        return target
