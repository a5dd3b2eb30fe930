"""A decoder's matrix products in 8 bits, forward and towards the inputs; weight gradients in the compute precision.

Callers: rill.training replaces the forward of the layers' nn.Linear (`replace_products_fp8`). Whatever is summed over
has a scale, its largest number divided by 448, and codes of e4m3: rows of x and of W in x Wᵀ, rows of dy and columns of
W in dy W. Masters, gradients and what the optimizer sees are as without. On the CPU the same codes are multiplied in
float32: as exact, and not faster.

T token, K summed axis, O output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from rill.errors import ConfigError
from rill.models.linear import ReplacedLinear
from rill.models.train.products import GradientSums, hand_over, product

_LARGEST = 448.0
_WIDTH_MULTIPLE = 16
"""The hardware's products take no other widths."""


def replace_products_fp8(layers: nn.Module, sums: GradientSums | None = None) -> None:
    for name, module in layers.named_modules():
        if Linear8.take(module):
            assert isinstance(module, Linear8)
            module.sums = sums
            if any(size % _WIDTH_MULTIPLE for size in module.weight.shape):
                raise ConfigError(
                    f"fp8 needs widths that are multiples of {_WIDTH_MULTIPLE}: layer {name} is "
                    f"{tuple(module.weight.shape)}; train without fp8"
                )


class Linear8(ReplacedLinear):
    sums: GradientSums | None

    def forward(self, x: Tensor) -> Tensor:
        x_TK, weight_OK = x.flatten(0, -2), self.weight
        if self.sums is None:
            codes = (*rounded8(x_TK.detach()), *rounded8(weight_OK.detach()))
            out: Tensor = torch.ops.rill.product_fp8(x_TK, weight_OK, *codes)
        else:
            out = _Product8.apply(x_TK, weight_OK, self.sums)  # type: ignore[no-untyped-call]
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def rounded8(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales [R, 1])."""
    x32 = x_RK.float()
    scale_R1 = x32.abs().amax(1, keepdim=True).clamp(min=1e-12) / _LARGEST
    codes_RK = (x32 / scale_R1).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes_RK.contiguous(), scale_R1


def product8(a_TK: Tensor, b_OK: Tensor) -> Tensor:
    """a bᵀ in a's precision, both rounded to 8 bits by rows."""
    return _multiplied(*rounded8(a_TK), *rounded8(b_OK), a_TK.dtype)


def _multiplied(a8_TK: Tensor, a_T1: Tensor, b8_OK: Tensor, b_O1: Tensor, dtype: torch.dtype) -> Tensor:
    if a8_TK.device.type == "cuda":
        return torch._scaled_mm(a8_TK, b8_OK.t(), a_T1, b_O1.t(), out_dtype=dtype, use_fast_accum=True)
    return ((a8_TK.float() * a_T1) @ (b8_OK.float() * b_O1).t()).to(dtype)


# --- an operation, for a compiler that joins the rounding with what comes before -------------------------------------


@torch.library.custom_op("rill::product_fp8", mutates_args=())
def product_fp8(
    x_TK: Tensor, weight_OK: Tensor, x8_TK: Tensor, x_T1: Tensor, weight8_OK: Tensor, weight_O1: Tensor
) -> Tensor:
    return _multiplied(x8_TK, x_T1, weight8_OK, weight_O1, x_TK.dtype)


@product_fp8.register_fake
def _(x_TK: Tensor, weight_OK: Tensor, *codes: Tensor) -> Tensor:
    # Not len(): it would be a number, and each row length compiled anew.
    return x_TK.new_empty(x_TK.shape[0], weight_OK.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradient(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
    x_TK, weight_OK = ctx.saved_tensors
    grad_x = product8(grad_TO, weight_OK.t()) if ctx.needs_input_grad[0] else None
    grad_weight = product(grad_TO.t(), x_TK) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None, None, None, None


product_fp8.register_autograd(_gradient, setup_context=_save)


@register_flop_formula(torch.ops.rill.product_fp8)
def _flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * x_shape[0] * weight_shape[0] * weight_shape[1])


# --- with gradients that are added up in float32, on the CPU ----------------------------------------------------------


class _Product8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_OK: Tensor, sums: GradientSums) -> Tensor:
        ctx.save_for_backward(x_TK, weight_OK)
        # Checkpointing gives back other tensors than were saved, and sums are found by the weight itself.
        ctx.weight, ctx.sums = weight_OK, sums
        return product8(x_TK, weight_OK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_TK, weight_OK = ctx.saved_tensors
        grad_TO = grads[0]
        grad_x = product8(grad_TO, weight_OK.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = hand_over(grad_TO.float().t() @ x_TK.float(), ctx.weight, ctx.sums)
        return grad_x, grad_weight, None
