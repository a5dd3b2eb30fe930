"""Experts of a step with few rows, where the time goes into reading their weights: one launch a product.

Registered with transformers as an implementation of its experts, so that it serves every architecture which keeps them
in two parameters, `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]; what it does not compute (biases, other layouts
and gates, gradients, many rows) goes to transformers' grouped products. Called by the CUDA engine's modules, captured
in its graphs: nothing is read on the host.

    choices [T, K] ─► blocks of rows, each of one expert ─► act(x Gᵀ) · (x Uᵀ) ─► · down, weighted ─► sum over K

A block has up to M rows, so that an expert's weights are read once for all its tokens, mostly.

Axes: T token, K choice, S = T·K, E expert, H hidden, I inner, B block, M row of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from rill.models.ops.triton_kernels import activated
from rill.models.ops.triton_language import power_of_2, precision, tl, triton
from rill.models.routing import is_stacked

NAME = "rill_few_rows"
MAX_CHOICES = 4096
"""Above, products are bound by arithmetic, and the library's are better."""


def use_for(model: nn.Module) -> None:
    """Of a model on a CUDA device that is only run forward."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for module in model.modules():
        if _is_plain(module):
            module.config._experts_implementation = NAME  # type: ignore[union-attr]


def experts_forward(experts: Any, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Σ_k weights[t, k] · expert[chosen[t, k]](x[t])."""
    is_few = chosen_TK.numel() <= MAX_CHOICES and not torch.is_grad_enabled()
    if is_few and _is_plain(experts):
        return few_rows(
            x_TH, experts.gate_up_proj, experts.down_proj, chosen_TK, weights_TK, is_gelu=_is_gelu(experts)
        )
    computed: Tensor = grouped_mm_experts_forward(experts, x_TH, chosen_TK, weights_TK)
    return computed


def few_rows(
    x_TH: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    *,
    is_gelu: bool = False,
) -> Tensor:
    num_tokens, num_choices = chosen_TK.shape
    num_experts, width, inner = down_EHI.shape
    rows = num_tokens * num_choices
    tile_m = min(64, max(16, power_of_2(-(-2 * rows // num_experts))))
    num_blocks = min(rows, -(-(rows + num_experts * (tile_m - 1)) // tile_m))
    order_BM = torch.empty(num_blocks, tile_m, dtype=torch.int32, device=x_TH.device)
    expert_B = torch.empty(num_blocks, dtype=torch.int32, device=x_TH.device)
    _blocks[(num_experts,)](
        chosen_TK.contiguous(), order_BM, expert_B, rows, num_experts, num_blocks, M=tile_m,
        BINS=power_of_2(num_experts + 1), CHUNK=min(1024, max(16, power_of_2(rows))), BLOCKS=power_of_2(num_blocks),
        num_warps=4,
    )  # fmt: skip
    inner_BMI = torch.empty(num_blocks, tile_m, inner, dtype=x_TH.dtype, device=x_TH.device)
    out_SH = torch.empty(rows, width, dtype=x_TH.dtype, device=x_TH.device)
    tile_n, tile_k = (32, 128) if tile_m == 16 else (64, 64)
    shape: dict[str, Any] = {
        "M": tile_m, "N": tile_n, "TILE_K": tile_k, "PRECISION": precision(x_TH.dtype), "num_warps": 4, "num_stages": 4,
    }  # fmt: skip
    _product[(-(-inner // tile_n), num_blocks)](
        x_TH, gate_up_EJH, order_BM, expert_B, None, inner_BMI, rows, num_choices, inner, width, x_TH.stride(0),
        gate_up_EJH.stride(0), GATED=True, GELU=is_gelu, **shape,
    )  # fmt: skip
    _product[(-(-width // tile_n), num_blocks)](
        inner_BMI, down_EHI, order_BM, expert_B, weights_TK.contiguous(), out_SH, rows, num_choices, width, inner,
        inner, down_EHI.stride(0), GATED=False, GELU=is_gelu, **shape,
    )  # fmt: skip
    return out_SH.view(num_tokens, num_choices, width).sum(1)


def _is_plain(experts: Any) -> bool:
    return (
        is_stacked(experts)
        and experts.gate_up_proj.is_contiguous()
        and experts.down_proj.is_contiguous()
        and type(experts)._apply_gate is _default_apply_gate
        and (_is_gelu(experts) or isinstance(experts.act_fn, type(ACT2FN["silu"])))
    )


def _is_gelu(experts: Any) -> bool:
    return isinstance(experts.act_fn, type(ACT2FN["gelu_pytorch_tanh"]))


@triton.jit
def _blocks(  # type: ignore[no-untyped-def]
    chosen_ptr, order_ptr, expert_ptr, S, E, B,
    M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program e: the blocks of expert e come behind those of the experts before it. order: which choice a row is, S for
    none; expert: of a block, -1 for none."""
    e = tl.program_id(0)
    at, bins, row = tl.arange(0, CHUNK), tl.arange(0, BINS), tl.arange(0, M)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, S, CHUNK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < S, other=E).to(tl.int32)
        counts += tl.histogram(chosen, BINS)
    blocks = tl.where(bins < E, (counts + M - 1) // M, 0)
    first = tl.sum(tl.where(bins < e, blocks, 0), axis=0)
    own = tl.sum(tl.where(bins == e, counts, 0), axis=0)
    used = (own + M - 1) // M
    block = tl.arange(0, BLOCKS)
    is_own_block = (block >= first) & (block < first + used)
    tl.store(expert_ptr + block, tl.zeros([BLOCKS], dtype=tl.int32) + e, mask=is_own_block)
    is_unused = (e == E - 1) & (block >= first + used) & (block < B)
    tl.store(expert_ptr + block, tl.full([BLOCKS], -1, dtype=tl.int32), mask=is_unused)
    rest = own + row
    tl.store(order_ptr + first * M + rest, tl.zeros([M], dtype=tl.int32) + S, mask=rest < used * M)
    found = 0
    for start in range(0, S, CHUNK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < S, other=E).to(tl.int32)
        is_own = chosen == e
        rank = found + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + first * M + rank, start + at, mask=is_own)
        found += tl.sum(is_own.to(tl.int32), axis=0)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, order_ptr, expert_ptr, share_ptr, out_ptr, S, K, num_out, num_in, stride_x, stride_e,
    GATED: tl.constexpr, GELU: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's rows times its expert's weight. GATED: from the tokens' rows to the block's, act(gate) · up; else from
    the block's to the choices', weighted."""
    block = tl.program_id(1)
    e = tl.load(expert_ptr + block)
    if e < 0:
        return
    row, column, k = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, TILE_K)
    choice = tl.load(order_ptr + block * M + row)
    is_row, is_column = choice < S, column < num_out
    own = (block * M + row).to(tl.int64)
    from_row = (choice // K).to(tl.int64) if GATED else own
    x_at = x_ptr + from_row[:, None] * stride_x + k[None, :]
    weight_at = weight_ptr + e.to(tl.int64) * stride_e + column.to(tl.int64)[None, :] * num_in + k[:, None]
    out, up = tl.zeros([M, N], dtype=tl.float32), tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, num_in, TILE_K):
        inside = k < num_in - start
        x = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        here = is_column[None, :] & inside[:, None]
        out = tl.dot(x, tl.load(weight_at + start, mask=here, other=0.0), out, input_precision=PRECISION)
        if GATED:
            up_at = weight_at + num_out.to(tl.int64) * num_in
            up = tl.dot(x, tl.load(up_at + start, mask=here, other=0.0), up, input_precision=PRECISION)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        made = activated(out, up, kind, GELU)
    else:
        share = tl.load(share_ptr + choice, mask=is_row, other=0.0).to(tl.float32)
        made = (out.to(kind).to(tl.float32) * share[:, None]).to(kind)
    to_row = own if GATED else choice.to(tl.int64)
    to = out_ptr + to_row[:, None] * num_out + column[None, :]
    tl.store(to, made, mask=is_row[:, None] & is_column[None, :])
