"""A decoder layer's MLP with its activation inside the products: Hopper GPUs in bf16.

Callers: rill.training replaces the forward of every MLP that computes as Llama's does (`fuse_mlps`). The first product
writes silu(gate) · up beside gate and up; in the backward pass the product that leads there applies the activation's
gradient. The package (quack, `rill[hopper]`) enters here.

Its kernels are made at the first call of a process, some seconds for both.

T token, D model width, F inner width; W rows of gate and up by turns.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

log = logging.getLogger(__name__)


@functools.cache
def has_fused_mlp(device: torch.device) -> bool:
    """Whether the package is there and its tiles, below, are for this device."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and has_quack()


def has_quack() -> bool:
    """Whether it is installed and can be imported: it has parts that must be those of the machine's CUDA."""
    if find_spec("quack") is None:
        return False
    try:
        importlib.import_module("quack.gemm_interface")
        if find_spec("quack.epilogue") is not None:  # else not looked at before a run's first step
            importlib.import_module("quack.epilogue.library")
    except (ImportError, RuntimeError, OSError, TypeError) as error:
        how = "install quack-kernels[cu13] beside CUDA 13, or uninstall quack-kernels"
        log.warning("MLPs are not fused, because quack cannot be imported (%s): %s", error, how)
        return False
    return True


def fuse_mlps(layers: nn.Module) -> int:
    """How many there were to replace. Not those with biases, adapters or an activation other than SiLU."""
    from transformers.activations import ACT2FN
    from transformers.models.llama.modeling_llama import LlamaMLP

    wanted = LlamaMLP.forward.__code__
    count = 0
    for module in list(layers.modules()):
        code = getattr(type(module).forward, "__code__", None)
        if code is None or (code.co_code, code.co_names) != (wanted.co_code, wanted.co_names):
            continue
        parts: list[Any] = [module.gate_proj, module.up_proj, module.down_proj]
        is_plain = all(type(part) is nn.Linear and part.bias is None for part in parts)
        if is_plain and isinstance(module.act_fn, type(ACT2FN["silu"])):
            module.__class__ = _fused(type(module))  # type: ignore[arg-type]
            count += 1
    return count


class FusedMLP:
    """Of which every replaced module is one."""

    gate_up: tuple[nn.Parameter, ...] = ()
    """[W, D] by turns, where keep_by_turns() made it. In a tuple, so that no module counts it as one more parameter."""


@functools.cache
def _fused(kind: Any) -> Any:
    """One class for all layers: functions of each module's own would be compiled one by one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.gate_up:
            (gate_up_WD,) = self.gate_up
        else:
            gate_up_WD = torch.ops.rill.by_turns(self.gate_proj.weight, self.up_proj.weight)
        out_TD: Tensor = torch.ops.rill.gated_mlp(x.flatten(0, -2), gate_up_WD, self.down_proj.weight)[0]
        return out_TD.view(x.shape)

    return type(f"Fused{kind.__name__}", (FusedMLP, kind), {"forward": forward})


def keep_by_turns(layers: nn.Module) -> None:
    """Let the trained gate and up weights of fused MLPs lie by turns for good. They become views of one parameter, with
    every second row each, and their gradients are views of its gradient. Else the weights are copied in each forward
    pass and the gradients in each backward pass.

    Only for a caller who reads and writes such weights and gradients by their strides.
    """
    for module in layers.modules():
        if isinstance(module, FusedMLP) and not module.gate_up:
            parts: list[Any] = [getattr(module, name) for name in ("gate_proj", "up_proj")]
            pair: list[nn.Parameter] = [part.weight for part in parts]
            # A row of an odd width would not begin where memory can be read fastest.
            if all(weight.requires_grad and weight.shape[1] % 16 == 0 for weight in pair):
                joined = nn.Parameter(by_turns(*(weight.detach() for weight in pair)))
                for weight, rows_FD in zip(pair, _rows(joined.detach()), strict=True):
                    weight.data = rows_FD
                give = functools.partial(_give_gradient, pair)
                joined.register_post_accumulate_grad_hook(give)  # type: ignore[no-untyped-call]
                module.gate_up = (joined,)


def _give_gradient(pair: Sequence[nn.Parameter], joined: Tensor) -> None:
    assert joined.grad is not None
    for weight, rows_FD in zip(pair, _rows(joined.grad), strict=True):
        weight.grad = rows_FD if weight.grad is None else weight.grad + rows_FD
    joined.grad = None


def _rows(both_WD: Tensor) -> tuple[Tensor, Tensor]:
    """Gate's and up's, as views."""
    both_F2D = both_WD.view(-1, 2, both_WD.shape[1])
    return both_F2D[:, 0], both_F2D[:, 1]


@torch.library.custom_op("rill::by_turns", mutates_args=())
def by_turns(gate_FD: Tensor, up_FD: Tensor) -> Tensor:
    """Rows of both by turns. Its gradients are whole tensors, not views that would be copied slowly later."""
    return torch.stack((gate_FD, up_FD), dim=1).flatten(0, 1)


@by_turns.register_fake
def _(gate_FD: Tensor, up_FD: Tensor) -> Tensor:
    return gate_FD.new_empty(2 * len(gate_FD), gate_FD.shape[1])


def _apart(ctx: Any, grad_WD: Tensor) -> tuple[Tensor, Tensor]:
    gate_FD, up_FD = _rows(grad_WD.contiguous())
    return gate_FD.contiguous(), up_FD.contiguous()


by_turns.register_autograd(_apart)


@functools.cache
def _tiles() -> tuple[Any, Any]:
    """Of the product with the activation, and of that with its gradient; the fastest of eight on an H200."""
    from quack.gemm_config import GemmConfig

    shared = {"cluster_m": 2, "cluster_n": 1, "is_dynamic_persistent": False, "device_capacity": 9}
    return (
        GemmConfig(tile_m=128, tile_n=192, pingpong=True, **shared),
        GemmConfig(tile_m=128, tile_n=128, pingpong=True, **shared),
    )


@torch.library.custom_op("rill::gated_mlp", mutates_args=())
def gated_mlp(x_TD: Tensor, gate_up_WD: Tensor, down_DF: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, D], gate and up by turns [T, W])."""
    from quack.gemm_interface import gemm_gated

    both_TW, inner_TF = gemm_gated(
        x_TD, gate_up_WD.t(), activation="swiglu", store_preact=True, tuned=False, config=_tiles()[0]
    )
    return inner_TF @ down_DF.t(), both_TW


@torch.library.custom_op("rill::gated_mlp_backward", mutates_args=())
def gated_mlp_backward(
    grad_TD: Tensor, x_TD: Tensor, gate_up_WD: Tensor, down_DF: Tensor, both_TW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, of gate and up, of down."""
    from quack.gemm_interface import gemm_dgated

    grad_TD = grad_TD.contiguous()
    grad_TW, inner_TF = gemm_dgated(
        grad_TD,
        down_DF,
        both_TW,
        activation="swiglu",
        dynamic_scheduler=False,
        tuned=False,
        config=_tiles()[1],
    )
    return grad_TW @ gate_up_WD, grad_TW.t() @ x_TD, grad_TD.t() @ inner_TF


@gated_mlp.register_fake
def _(x_TD: Tensor, gate_up_WD: Tensor, down_DF: Tensor) -> tuple[Tensor, Tensor]:
    # Not len(): it would be a number, and each row length compiled anew.
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape[0], gate_up_WD.shape[0])


@gated_mlp_backward.register_fake
def _(
    grad_TD: Tensor, x_TD: Tensor, gate_up_WD: Tensor, down_DF: Tensor, both_TW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (x_TD, gate_up_WD, down_DF))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _gradient(ctx: Any, grad_TD: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = gated_mlp_backward(grad_TD, *ctx.saved_tensors)
    return grads


gated_mlp.register_autograd(_gradient, setup_context=_save)


@register_flop_formula(torch.ops.rill.gated_mlp)
def _flops(x_shape: Any, gate_up_shape: Any, *args: Any, **kwargs: Any) -> int:
    return int(3 * x_shape[0] * gate_up_shape[0] * gate_up_shape[1])
