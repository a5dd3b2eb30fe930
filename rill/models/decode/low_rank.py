"""LoRA adapters on the fast path: all that are loaded are one low-rank product beside each projection.

    y = x Wᵀ + ((x Aᵀ) ∘ own) Bᵀ          own[n, r] = 1 where rank r belongs to the adapter of row n, else 0

A stacks the down-projections of all adapters and of all modules that the projection joins; B has their up-projections,
scaled, in the rows of their module and zeros elsewhere. So rows with different adapters and with none share one batch
and one captured graph, whose shape changes only when an adapter is loaded or unloaded.

Axes: N token of the flat batch, R rank over all adapters and joined modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rill.models.decode.structure import Layer, Projection

NO_ADAPTER = 0

AdapterTensors = Mapping[str, tuple[Tensor, Tensor]]
"""Module name -> A [rank, in] and scaled B [out, rank]."""


@dataclass(frozen=True, slots=True)
class _Pair:
    down_RK: Tensor
    up_OR: Tensor
    owner_R: Tensor
    """Number of the adapter that each rank belongs to; one tensor for all projections with the same owners."""


class LowRankBank:
    """The loaded adapters, arranged by projection."""

    def __init__(
        self,
        layers: Sequence[Layer],
        names: Mapping[torch.nn.Module, str],
        adapters: Mapping[str, AdapterTensors],
    ) -> None:
        """`names`: what the adapters call each module."""
        self._numbers = {name: number for number, name in enumerate(adapters, start=NO_ADAPTER + 1)}
        self._owners: dict[tuple[int, ...], Tensor] = {}
        self._pairs: dict[int, _Pair] = {}
        taken: set[str] = set()
        for layer in layers:
            for projection in layer.projections:
                members = [names[module] for module in projection.modules]
                taken.update(members)
                pair = self._pair(projection, members, adapters)
                if pair is not None:
                    self._pairs[id(projection)] = pair
        self.covers_all = all(taken.issuperset(tensors) for tensors in adapters.values())
        """Whether no adapter changes a module that is not one of the layers' projections."""

    def number(self, name: str) -> int:
        return self._numbers[name]

    def rows(self, numbers_N: Tensor) -> AdapterRows:
        return AdapterRows(self._pairs, numbers_N)

    def _pair(
        self, projection: Projection, members: list[str], adapters: Mapping[str, AdapterTensors]
    ) -> _Pair | None:
        sizes = [module.weight.shape[0] for module in projection.modules]
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        owners: list[int] = []
        for adapter, tensors in adapters.items():
            for index, member in enumerate(members):
                if member not in tensors:
                    continue
                down, up = tensors[member]
                whole = up.new_zeros(sum(sizes), up.shape[1])
                whole[sum(sizes[:index]) : sum(sizes[: index + 1])] = up
                downs.append(down)
                ups.append(whole)
                owners += [self._numbers[adapter]] * down.shape[0]
        if not downs:
            return None
        key = tuple(owners)
        if key not in self._owners:
            self._owners[key] = torch.tensor(owners, dtype=torch.int32, device=downs[0].device)
        return _Pair(torch.cat(downs), torch.cat(ups, dim=1).contiguous(), self._owners[key])


class AdapterRows:
    """A batch's rows with their adapters' numbers, for one pass through the layers."""

    def __init__(self, pairs: Mapping[int, _Pair], numbers_N: Tensor) -> None:
        self._pairs = pairs
        self._numbers_N1 = numbers_N[:, None]
        self._own: dict[int, Tensor] = {}

    def add_to(self, y: Tensor, projection: Projection, x: Tensor) -> Tensor:
        """In place; returns y."""
        pair = self._pairs.get(id(projection))
        if pair is None:
            return y
        own_NR = self._own.get(id(pair.owner_R))
        if own_NR is None:
            own_NR = self._own[id(pair.owner_R)] = (self._numbers_N1 == pair.owner_R).to(x.dtype)
        return y.addmm_((x @ pair.down_RK.T) * own_NR, pair.up_OR.T)
