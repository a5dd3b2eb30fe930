"""Experts: which of them each token is sent to, recorded in the engine and replayed in the trainer (R3).

A router's top-k is a cliff: rounding that moves a logprob by 1e-3 elsewhere may send a token to another expert here,
and then the trainer differentiates another network than the one that sampled. So the engine records every choice, the
choices travel with the sample (Trajectory.routed_experts), and the trainer makes the same ones: the weights of the
chosen experts still come from its own router, and gradients flow through them.

Routers are written in many ways and all end in one call: top-k over the experts. `Routing` answers that call inside the
model's expert blocks (modules with a child named `experts`), so that it knows no architecture by name.

T token of the flat batch or pack, L layer with experts, K chosen expert, E expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rill.errors import UnsupportedError

UNKNOWN = -1
"""In place of an expert: nobody recorded a choice, the router makes its own."""


def expert_blocks(model: nn.Module) -> list[Any]:
    """Modules that route tokens to experts, in the order of their layers."""
    return [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]


class Routing:
    """Of one model. One thread at a time runs it."""

    def __init__(self, model: nn.Module, *, is_compiled: bool = False) -> None:
        """`is_compiled`: the model's layers are; expert blocks then run as they are."""
        self._blocks = expert_blocks(model)
        if not self._blocks:
            raise UnsupportedError("the model has no experts, so there is no routing to record or replay")
        self.is_recording = False
        self._plan_TLK: Tensor | None = None
        self._chosen: dict[int, Tensor] = {}
        self._loads: dict[int, Tensor] = {}
        self._agreed: list[tuple[Tensor, Tensor]] = []
        for layer, block in enumerate(self._blocks):
            forward: Callable[..., Any] = functools.partial(self._forward, layer, block.forward)
            if is_compiled:
                forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
            block.forward = functools.wraps(block.forward)(forward)

    @property
    def num_layers(self) -> int:
        return len(self._blocks)

    def replay(self, plan_TLK: Tensor | None) -> None:
        """Passes from here on, recomputed ones too, choose these experts; UNKNOWN and None: the router's own."""
        if plan_TLK is not None and plan_TLK.shape[1] != self.num_layers:
            raise UnsupportedError(
                f"choices of {plan_TLK.shape[1]} layers with experts were recorded, the model has {self.num_layers}"
            )
        self._plan_TLK = plan_TLK

    def take(self) -> Tensor:
        """[T, L, K] int16 of the last pass, recorded."""
        missing = [i for i in range(self.num_layers) if i not in self._chosen]
        if missing:
            name = type(self._blocks[missing[0]]).__name__
            raise UnsupportedError(
                f"{name} chooses experts by other means than top-k: its routing cannot be recorded"
            )
        chosen = torch.stack([self._chosen[i] for i in range(self.num_layers)], dim=1).to(torch.int16)
        self._chosen = {}
        return chosen

    def metrics(self) -> dict[str, float]:
        """Since the last call. `router/max_violation`: the busiest expert's load over the mean, less 1, mean over
        layers. `router/agreement`: of replayed choices, the share that the router would have made itself."""
        found: dict[str, float] = {}
        if self._loads:
            loads_LE = torch.stack([self._loads[i].float() for i in sorted(self._loads)])
            found["router/max_violation"] = float((loads_LE.amax(1) / loads_LE.mean(1) - 1).mean())
        if self._agreed:
            same, count = (torch.stack(column).sum().item() for column in zip(*self._agreed, strict=True))
            found["router/replayed_choices"] = float(count)
            if count:
                found["router/agreement"] = float(same / count)
        self._loads, self._agreed = {}, []
        return found

    def _forward(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _TopK(self, layer):
            return forward(*args, **kwargs)

    def choose(self, layer: int, scores_TE: Tensor, natural_TK: Tensor) -> Tensor:
        """The experts of each token, where the router itself would take natural_TK."""
        chosen_TK = natural_TK
        if self._plan_TLK is not None:
            plan_TK = self._plan_TLK[:, layer].to(natural_TK)
            if plan_TK.shape != natural_TK.shape:
                raise UnsupportedError(
                    f"recorded choices are {tuple(plan_TK.shape)}, the router's {tuple(natural_TK.shape)}"
                )
            chosen_TK = torch.where(plan_TK == UNKNOWN, natural_TK, plan_TK)
            is_same = (natural_TK[:, :, None] == plan_TK[:, None, :]).any(-1)
            self._agreed.append((is_same.sum(), (plan_TK != UNKNOWN).sum()))
        if self.is_recording:
            self._chosen[layer] = chosen_TK.detach()
        else:
            count_E = torch.zeros(scores_TE.shape[-1], dtype=torch.int64, device=scores_TE.device)
            count_E.scatter_add_(0, chosen_TK.detach().flatten(), torch.ones_like(chosen_TK.flatten()))
            self._loads[layer] = self._loads.get(layer, 0) + count_E
        return chosen_TK

    def num_experts(self, layer: int) -> int:
        experts = self._blocks[layer].experts
        return int(experts.num_experts) if hasattr(experts, "num_experts") else len(experts)


class _TopK(TorchFunctionMode):
    """Answers the top-k over all experts of one block; group-limited routers have others, over groups."""

    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer
        self._num_experts = routing.num_experts(layer)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[-1] != self._num_experts:
            return result
        chosen = self._routing.choose(self._layer, scores, result.indices)
        if chosen is result.indices:
            return result
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
