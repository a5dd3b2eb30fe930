"""Copies new weights into a model's parameters by name, and proves that all of them came.

Where several ranks hold the model (rill.models.decode.shards), rank 0 is given the tensors, cuts each as it comes and
sends the others theirs: no rank holds a second copy of the model, and none but rank 0 sees a whole tensor that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from rill.errors import WeightSyncError
from rill.inference.base import NamedTensors
from rill.models.decode.quantized import Writer
from rill.models.decode.shards import Shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightTargets:
    """Where each name's tensor goes. The walk over the modules is made once; an update finds its targets in a table."""

    def __init__(
        self,
        model: PreTrainedModel,
        shards: Shards | None = None,
        announce: Callable[[str], None] | None = None,
        quantized: Mapping[int, Writer] | None = None,
    ) -> None:
        """`announce`: tells the other ranks to receive() their part of this name now. `quantized`: which parameters
        have fewer bits, by id, and what writes them (rill.models.decode.quantized)."""
        self._shards, self._announce, self._quantized = shards, announce, quantized or {}
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
            if self._shards is not None:
                self._share(self._shards, name, tensor.detach().to(target))
            elif id(target) in self._quantized:
                self._quantized[id(target)](tensor.detach().to(target.device))
            elif at_once and tensor.device == target.device and tensor.dtype == target.dtype:
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

    def receive(self, name: str) -> None:
        """On the other ranks: what rank 0 sends of this tensor, into its place."""
        assert self._shards is not None
        into = self._by_name[name].data
        if name in self._shards.cuts:
            self._shards.group.scatter(into)
        else:
            self._shards.group.broadcast(into)

    def _target(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        target = self._by_name.get(name)
        if target is None:
            raise WeightSyncError(
                f"the update brings {name!r}, which the model does not have: "
                f"its names look like {next(iter(self._by_name))!r}"
            )
        shape = target.shape if self._shards is None else self._shards.shapes.get(name, target.shape)
        if tensor.shape != shape:
            raise WeightSyncError(
                f"{name} arrived with shape {tuple(tensor.shape)}, the model's is {tuple(shape)}: "
                "send full, unsharded tensors"
            )
        return target

    def _share(self, shards: Shards, name: str, whole: torch.Tensor) -> None:
        """On rank 0: every rank's part into its place."""
        assert self._announce is not None
        self._announce(name)
        into, cut, size = self._by_name[name].data, shards.cuts.get(name), shards.group.size
        if cut is None:
            into.copy_(shards.group.broadcast(whole.contiguous()))
        else:
            shards.group.scatter(into, [cut.part(whole, r, size).contiguous() for r in range(size)])
