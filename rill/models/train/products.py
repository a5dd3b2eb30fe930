"""Matrix products of a training step on the CPU: in 16 bits they are summed in float32 and rounded once.

Callers: rill.training.engine and rill.training.score replace the forward of every nn.Linear (`replace_products`);
rill.models.train.head multiplies with `product`. What torch does with a bfloat16 product depends on the processor, and
without instructions for it takes several times as long as in float32. Here the numbers are the
same on every machine, up to the order of a float32 sum.

Weight gradients may be added up in float32 beside the weights (`GradientSums`), so that several micro-batches are as
good as one. On CUDA nothing is replaced: its products are summed in float32 by the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rill.models.linear import ReplacedLinear


class GradientSums(Protocol):
    """Where float32 weight gradients are added up beside the weights, when autograd's own place is too coarse."""

    def sum_of(self, weight: Tensor) -> tuple[Tensor, bool] | None:
        """(float32 tensor, whether it already holds something), or None: return the gradient to autograd."""


def is_coarse(tensor: Tensor) -> bool:
    """Whether torch's own products of it would depend on the processor."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in a's precision."""
    return (a.float() @ b.float()).to(a.dtype) if is_coarse(a) else a @ b


Held = Callable[[Tensor], Tensor]
"""A weight as an engine will hold it, with fewer bits."""


def linear(
    x: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    sums: GradientSums | None = None,
    held: Held | None = None,
) -> Tensor:
    """x Wᵀ + b, with exact gradients; the weight's goes into `sums` where that has a place for it. `held`: computed
    with held(W), and the gradient is W's as if it were that (straight through)."""
    if sums is None or not is_coarse(x):
        if held is not None:  # zero is added, for its gradient
            weight_OK = held(weight_OK.detach()) + (weight_OK - weight_OK.detach())
        if not is_coarse(x):
            return functional.linear(x, weight_OK, bias_O)
        # In operations that a compiler knows.
        bias_O = None if bias_O is None else bias_O.float()
        return functional.linear(x.float(), weight_OK.float(), bias_O).to(x.dtype)
    return _Linear.apply(x, weight_OK, bias_O, sums, held)  # type: ignore[no-any-return,no-untyped-call]


def hand_over(total_OK: Tensor, weight_OK: Tensor, sums: GradientSums | None) -> Tensor | None:
    """A weight's gradient to `sums` (then None), or for autograd in the weight's precision."""
    place = sums.sum_of(weight_OK) if sums is not None and is_coarse(weight_OK) else None
    if place is None:
        return total_OK.to(weight_OK.dtype)
    place[0].add_(total_OK) if place[1] else place[0].copy_(total_OK)
    return None


def replace_products(model: nn.Module, sums: GradientSums | None = None, held: Held | None = None) -> None:
    """Its linear layers compute as `linear` does. `held`: quantisation-aware training, with what an engine holds."""
    for module in model.modules():
        if ExactLinear.take(module):
            assert isinstance(module, ExactLinear)
            module.sums, module.held = sums, held


class ExactLinear(ReplacedLinear):
    sums: GradientSums | None
    held: Held | None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.sums, self.held)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: GradientSums | None, held: Held | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Checkpointing gives back other tensors than were saved, and sums are found by the weight itself.
        ctx.weight, ctx.sums, ctx.held = weight, sums, held
        weight = weight if held is None else held(weight)
        out = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        held = weight if ctx.held is None else ctx.held(weight)
        grad_x = product(grad, held).view(x.shape) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = hand_over(grad.float().t() @ x.flatten(0, -2).float(), ctx.weight, ctx.sums)
        grad_bias = grad.float().sum(0).to(grad.dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None
