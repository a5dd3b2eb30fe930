"""Kernels for steps of few rows, where the time goes into reading weights: products that keep memory busy.

A product of few rows is cut along both sides of its weight so that every multiprocessor reads a part of it at once, and
what was cut along the summed axis is added up, always in the same order, by the kernel that reads it next:

    product ─► parts [P, B, N] float32 ─► turn and store │ add and norm

Launches overlap (rill.models.ops.triton_language.await_inputs): a product asks for its weights while the kernel before
it still runs, so that the small kernels between two products cost memory no time.

Called by rill.models.decode.skinny, captured in its graphs.

Axes: B row, N output, K input, P part of the summed axis, H query head, G key/value head, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rill.models.decode.attention_paged import CacheRows
from rill.models.decode.structure import HeadNorms
from rill.models.ops.fp8 import Activations, values_and_scales
from rill.models.ops.triton_fp8 import cached
from rill.models.ops.triton_kernels import activated, turned
from rill.models.ops.triton_language import await_inputs, early_launch, power_of_2, precision, tl, triton


@dataclass(frozen=True, slots=True)
class ProductShape:
    """How a product is cut for one shape of weight."""

    num_parts: int
    tile_n: int
    tile_k: int
    num_stages: int
    num_warps: int
    prefetch_bytes: int
    """Of each row of a tile, asked for while the kernel before still runs. 0: none."""


@triton.jit
def _prefetch(pointers, num_bytes):  # type: ignore[no-untyped-def]
    """Ask for num_bytes (a multiple of 16) from each pointer on; nobody waits for them. From Hopper on."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _product(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, rows, num_out, num_in, part_in, prefetch_bytes,
    GATED: tl.constexpr, GELU: tl.constexpr, TILE_B: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    SCALED: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[part, row, n] = Σ x[row, k] w[n, k] over the part's k; GATED: act(gate) · up, w being gates above ups."""
    i = tl.arange(0, TILE_N)
    if GATED:
        # Half of the tile are gates, half the ups that belong to them.
        n = tl.program_id(0) * (TILE_N // 2) + i % (TILE_N // 2)
        w_row = tl.minimum(n, num_out - 1) + tl.where(i < TILE_N // 2, 0, num_out)
    else:
        n = tl.program_id(0) * TILE_N + i
        w_row = tl.minimum(n, num_out - 1)
    part = tl.program_id(1)
    first = part * part_in
    end = tl.minimum(first + part_in, num_in)
    w_rows = w_ptr + w_row.to(tl.int64) * num_in
    if PREFETCH:
        # In two halves a row, one to a thread: what several threads hold alike is asked for several times.
        width: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        size = tl.minimum(prefetch_bytes, (end - first) * width) // 2
        halves = tl.zeros([TILE_N, 2], tl.int32) + size
        _prefetch((w_rows + first)[:, None] + tl.arange(0, 2)[None, :] * (size // width), halves)
    await_inputs(PDL)
    b = tl.arange(0, TILE_B)
    k = tl.arange(0, TILE_K)
    x_at = x_ptr + b[:, None] * num_in + k[None, :]
    w_at = w_rows[:, None] + k[None, :]
    acc = tl.zeros([TILE_N, TILE_B], tl.float32)
    for at in range(first, end, TILE_K):
        w = tl.load(w_at + at)
        x = tl.load(x_at + at, mask=(b < rows)[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if SCALED:
        acc *= (
            tl.load(w_scale_ptr + w_row)[:, None]
            * tl.load(x_scale_ptr + b, mask=b < rows, other=0.0)[None, :]
        )
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_N // 2, TILE_B)), (1, 2, 0)))
        out = activated(gate, up, kind, GELU)
        n = tl.program_id(0) * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    else:
        out = acc.to(kind)
    to = out_ptr + (part.to(tl.int64) * rows + b[None, :]) * num_out + n[:, None]
    tl.store(to, out, mask=(b < rows)[None, :] & (n < num_out)[:, None])


@triton.jit
def _head_of_parts(  # type: ignore[no-untyped-def]
    part_ptr, bias_ptr, step, at, mask, kind: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr
):
    x = tl.load(part_ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, P):
        x += tl.load(part_ptr + part * step + at, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x.to(kind)


@triton.jit(do_not_specialize=["rows"])
def _turn_parts(  # type: ignore[no-untyped-def]
    part_ptr, bias_ptr, query_ptr, cos_ptr, sin_ptr, pos_ptr, slot_ptr, qw_ptr, kw_ptr, rows, eps, keys_ptr, values_ptr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: Σ parts; queries and keys are turned, keys and values go into the cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    half = at < D // 2
    kind: tl.constexpr = query_ptr.dtype.element_ty
    position = tl.load(pos_ptr + row)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    await_inputs(PDL)
    width = (H + 2 * G) * D
    mine = part_ptr + row * width
    here = head * D + at
    a = _head_of_parts(mine, bias_ptr, rows * width, here, half, kind, P, HAS_BIAS)
    b = _head_of_parts(mine, bias_ptr, rows * width, here + D // 2, half, kind, P, HAS_BIAS)
    if head >= H + G:
        at_v = values_ptr + (slot * G + head - H - G) * D + at
        tl.store(at_v, cached(a, values_ptr), mask=half)
        tl.store(at_v + D // 2, cached(b, values_ptr), mask=half)
    else:
        x, y = a.to(tl.float32), b.to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt_rn((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / D + eps)
            weight_ptr = qw_ptr
            if head >= H:
                weight_ptr = kw_ptr
            wa = tl.load(weight_ptr + at, mask=half, other=0.0).to(tl.float32)
            wb = tl.load(weight_ptr + D // 2 + at, mask=half, other=0.0).to(tl.float32)
            x = ((x * scale).to(kind).to(tl.float32) * wa).to(kind).to(tl.float32)
            y = ((y * scale).to(kind).to(tl.float32) * wb).to(kind).to(tl.float32)
        turned_x, turned_y = turned(x, y, cos_ptr + position * D, sin_ptr + position * D, at, half, kind, D)
        if head < H:
            at_q = query_ptr + (row * H + head) * D + at
            tl.store(at_q, turned_x, mask=half)
            tl.store(at_q + D // 2, turned_y, mask=half)
        else:
            at_k = keys_ptr + (slot * G + head - H) * D + at
            tl.store(at_k, cached(turned_x, keys_ptr), mask=half)
            tl.store(at_k + D // 2, cached(turned_y, keys_ptr), mask=half)


def product(
    x_BK: Activations,
    weight_NK: Tensor,
    shape: ProductShape,
    *,
    dtype: torch.dtype,
    scales_N: Tensor | None = None,
    is_gelu: bool | None = None,
) -> Tensor:
    """Parts [P, B, N] whose sum is x @ weight.T. A weight of 8 bits has scales, and x has 8 bits then too. `is_gelu`:
    the weight's rows are gates and then ups, and the one part is act(x @ gate.T) · (x @ up.T)."""
    x, x_scales = values_and_scales(x_BK)
    is_gated = is_gelu is not None
    assert (x_scales is None) == (scales_N is None) and not (is_gated and shape.num_parts > 1)
    (rows, num_in), sides = x.shape, 2 if is_gated else 1
    num_out = weight_NK.shape[0] // sides
    out = torch.empty(shape.num_parts, rows, num_out, dtype=dtype, device=x.device)
    part_in = -(-(num_in // shape.tile_k) // shape.num_parts) * shape.tile_k
    early = early_launch(x.device)
    _product[(-(-num_out // (shape.tile_n // sides)), shape.num_parts)](
        x, weight_NK, x_scales, scales_N, out, rows, num_out, num_in, part_in, shape.prefetch_bytes, GATED=is_gated,
        GELU=is_gelu is True, TILE_B=max(16, power_of_2(rows)), TILE_N=shape.tile_n, TILE_K=shape.tile_k,
        SCALED=scales_N is not None, PREFETCH=early["PDL"] and shape.prefetch_bytes > 0 and x.dtype.itemsize <= 2,
        PRECISION=precision(x.dtype), num_warps=shape.num_warps, num_stages=shape.num_stages, **early,
    )  # fmt: skip
    return out


def turn_parts(
    parts_PBN: Tensor, bias: Tensor | None, to: CacheRows, num_heads: int, norms: HeadNorms | None
) -> Tensor:
    """Queries [B, H·D], turned; keys and values go to their slots of the cache."""
    num_parts, rows, _ = parts_PBN.shape
    kv_heads, dim = to.keys.shape[2:]
    q_norm, k_norm = (None, None) if norms is None else (norms.query.weight, norms.key.weight)
    eps = 0.0 if norms is None else norms.query.eps
    query = torch.empty(rows, num_heads * dim, dtype=to.cos.dtype, device=to.keys.device)
    _turn_parts[(rows, num_heads + 2 * kv_heads)](
        parts_PBN, bias, query, *to[:4], q_norm, k_norm, rows, eps, to.keys, to.values, H=num_heads,
        G=kv_heads, D=dim, HALF=power_of_2(dim // 2), P=num_parts, HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None, num_warps=1, **early_launch(to.keys.device),
    )  # fmt: skip
    return query
