"""Experts: which of them each token is sent to, recorded in the engine, replayed (R3) and balanced in the trainer.

A router's top-k is a cliff: rounding that moves a logprob by 1e-3 elsewhere may send a token to another expert here,
and then the trainer differentiates another network than the one that sampled. So the engine records every choice, the
choices travel with the sample (Trajectory.routed_experts), and the trainer makes the same ones: the weights of the
chosen experts still come from its own router, and gradients flow through them.

Routers are written in many ways and all end in one call: top-k over the experts. `Routing` answers that call inside the
model's expert blocks (modules with a child named `experts`), so that it knows no architecture by name.

Experts are kept busy in two ways. The balance loss of a pass (Switch Transformer's: E Σ_e f_e P_e, of the share f of
choices and the mean probability P) pulls the router's probabilities. Routers with a correction bias, DeepSeek-V3's and
its relatives', need no loss: it moves after each optimizer step towards the experts with less than the mean load.

T token of the flat batch or pack, L layer with experts, K chosen expert, E expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rill.errors import UnsupportedError

BIAS_NAME = "e_score_correction_bias"
"""What transformers calls the correction bias of a router, in all its families."""

UNKNOWN = -1
"""In place of an expert: nobody recorded a choice, the router makes its own."""


def expert_blocks(model: nn.Module) -> list[Any]:
    """Modules that route tokens to experts, in the order of their layers."""
    return [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]


def is_stacked(experts: Any) -> bool:
    """Its weights are `gate_up_proj` [E, 2I, H], gates first, and `down_proj` [E, H, I], as in transformers mostly."""
    held = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    return (
        all(isinstance(weight, Tensor) for weight in held)
        and getattr(experts, "has_gate", False)
        and getattr(experts, "is_concatenated", False)
        and not experts.has_bias
        and not experts.is_transposed
    )


class Routing:
    """Of one model. One thread at a time runs it."""

    def __init__(
        self, model: nn.Module, *, is_compiled: bool = False, balances: bool = False, bias_rate: float = 0.0
    ) -> None:
        """`is_compiled`: the model's layers are; expert blocks then run as they are. `balances`: training passes have a
        balance loss. `bias_rate`: how far a correction bias moves in a step."""
        self._blocks = expert_blocks(model)
        if not self._blocks:
            raise UnsupportedError("the model has no experts, so there is no routing to record or replay")
        self._biases = [b for m in self._blocks for n, b in m.named_buffers() if n.endswith(BIAS_NAME)]
        if balances and self._biases:
            raise UnsupportedError(
                "its routers are balanced by a correction bias: set trainer.router_bias_rate instead of "
                "router_balance_loss"
            )
        if bias_rate and len(self._biases) != len(self._blocks):
            raise UnsupportedError(
                "its routers have no correction bias to move: set trainer.router_balance_loss instead of "
                "router_bias_rate"
            )
        self.is_recording = False
        self._balances = balances
        self._bias_rate = bias_rate
        self._has_probabilities: bool | None = None
        self._terms: list[Tensor] | None = None
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

    @contextmanager
    def training_pass(self) -> Iterator[list[Tensor]]:
        """The forward pass in here counts: its loads, and in the list each layer's balance loss, where asked for. What
        is computed again during backward does not."""
        self._terms = []
        try:
            yield self._terms
        finally:
            self._terms = None

    @torch.no_grad()
    def finish_step(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """After an optimizer step: move the biases; figures since the last one, summed over ranks by `reduce`.
        `router/max_violation`: the busiest expert's load over the mean, less 1, mean over layers. `router/agreement`:
        of replayed choices, the share that the router would have made itself."""
        like = next(self._blocks[0].parameters())
        own_LE = torch.zeros(self.num_layers, self.num_experts(0), dtype=torch.float64, device=like.device)
        for layer, load_E in self._loads.items():
            own_LE[layer] = load_E
        same, count = (sum(column) for column in zip(*self._agreed, strict=True)) if self._agreed else (0, 0)
        figures = torch.cat([own_LE.flatten(), own_LE.new_tensor([float(same), float(count)])])
        figures = reduce(figures)
        self._loads, self._agreed = {}, []
        loads_LE, (same, count) = figures[:-2].view_as(own_LE), figures[-2:].tolist()
        found: dict[str, float] = {}
        if loads_LE.sum() > 0:
            mean_L = loads_LE.mean(1, keepdim=True)
            found["router/max_violation"] = float((loads_LE / mean_L).amax(1).mean() - 1)
            for bias_E, less_E in zip(self._biases, (mean_L - loads_LE).sign(), strict=False):
                bias_E.add_(self._bias_rate * less_E.to(bias_E))
        if count:
            found["router/replayed_choices"] = count
            found["router/agreement"] = same / count
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
        if self._balances or self._terms is not None:
            self._count(layer, scores_TE, chosen_TK.detach().flatten())
        return chosen_TK

    def _count(self, layer: int, scores_TE: Tensor, chosen_S: Tensor) -> None:
        count_E = torch.zeros(scores_TE.shape[-1], dtype=torch.int64, device=scores_TE.device)
        count_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S))
        # Computed again in backward too, where nothing is counted.
        balance = self._balance(scores_TE, count_E) if self._balances else None
        if self._terms is not None:
            if balance is not None:
                self._terms.append(balance)
            self._loads[layer] = self._loads.get(layer, 0) + count_E

    def _balance(self, scores_TE: Tensor, count_E: Tensor) -> Tensor:
        """1 × K where all experts are chosen alike. Scores are probabilities or logits, as the router has it."""
        if self._has_probabilities is None:
            self._has_probabilities = bool((scores_TE >= 0).all())
        scores_TE = scores_TE.float()
        if not self._has_probabilities:
            scores_TE = scores_TE.softmax(-1)
        share_E = count_E / scores_TE.shape[0]
        return scores_TE.shape[-1] * (share_E * scores_TE.mean(0)).sum()

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
