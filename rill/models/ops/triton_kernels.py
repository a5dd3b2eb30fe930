"""CUDA kernels in Triton: attention of prompts, norms, rotary embedding, activation, invariant products.

`TritonKernels` offers the same calls as rill.models.ops.cpu_kernels.CpuKernels, so the fused decoder and the registered
attention run on either. Nothing here synchronises with the host, so all of it can be captured in a CUDA graph.
Attention of single tokens is in rill.models.ops.triton_decode.

Axes: N token of the flat batch, B sequence, H query head, K key/value head, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rill.models.decode.attention_paged import CacheRows, LayerCache, PagedBatch
from rill.models.decode.structure import HeadNorms, Norm
from rill.models.eager import ScoreRule
from rill.models.ops.fp8 import NO_SCALES, Activations, Fp8Rows, ProductScales, values_and_scales
from rill.models.ops.triton_decode import DecodeAttention, attend
from rill.models.ops.triton_fp8 import as_read, cached, scaled, store_fp8, store_scaled
from rill.models.ops.triton_language import (
    await_inputs,
    await_inputs_alone,
    early_launch,
    power_of_2,
    precision,
    tl,
    triton,
)

PREFILL_TILE = 64
FEW_PROGRAMS = 256
"""So many run at once on a device, however many warps each has: found by trying, on an H200."""


@triton.jit
def normed(x, w, size, eps, kind: tl.constexpr, GEMMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, rounded where the modules' own functions round."""
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / size + eps)
    if GEMMA:
        return (x * scale * (1.0 + w)).to(kind)
    return ((x * scale).to(kind).to(tl.float32) * w).to(kind)


@triton.jit
def activated(gate, up, kind: tl.constexpr, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(gate) · up, rounded likewise."""
    g = gate.to(kind).to(tl.float32)
    if GELU:
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        act = g / (1.0 + tl.exp(-2.0 * z))
    else:
        act = g / (1.0 + tl.exp(-g))
    return (act.to(kind).to(tl.float32) * up.to(kind).to(tl.float32)).to(kind)


@triton.jit
def turned(a, b, cos_ptr, sin_ptr, at, half, kind: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of heads, turned and rounded likewise."""
    ca = tl.load(cos_ptr + at, mask=half, other=0.0).to(tl.float32)
    cb = tl.load(cos_ptr + D // 2 + at, mask=half, other=0.0).to(tl.float32)
    sa = tl.load(sin_ptr + at, mask=half, other=0.0).to(tl.float32)
    sb = tl.load(sin_ptr + D // 2 + at, mask=half, other=0.0).to(tl.float32)
    first = ((a * ca).to(kind).to(tl.float32) - (b * sa).to(kind).to(tl.float32)).to(kind)
    return first, ((b * cb).to(kind).to(tl.float32) + (a * sb).to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["num_words", "rows", "stride"])
def _take_inputs(  # type: ignore[no-untyped-def]
    ring_ptr, turn_ptr, last_ptr, tables_ptr, out_ptr, num_words, ring_words, rows, stride, SLOTS: tl.constexpr,
    PLACES: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    buffer = ring_ptr + tl.load(turn_ptr).to(tl.int64) * ring_words
    word = tl.load(buffer + at, mask=at < num_words, other=0)
    slot = tl.load(buffer + SLOTS * stride + at, mask=at < rows, other=0)
    last = tl.load(last_ptr + slot, mask=at < rows, other=0)
    tl.store(out_ptr + at, tl.where((at < rows) & (word < 0), last, word), mask=at < num_words)
    row = at - PLACES * stride
    is_place = (row >= 0) & (row < rows)
    value = tl.load(buffer + VALUES * stride + row, mask=is_place, other=0)
    tl.store(tables_ptr + word, value, mask=is_place & (word >= 0))


def take_inputs(
    ring: Tensor, turn: Tensor, last_tokens: Tensor, tables: Tensor, into: Tensor, rows: int, stride: int,
    *, slots: int, places: int, values: int,
) -> None:  # fmt: skip
    """The words of the ring's buffer whose turn it is. They begin with columns of `rows` words, `stride` apart: token
    ids, for which those below 0 stand for the newest of their slot; and, each by its index, slots, places in the tables
    that change (none below 0) and what they become."""
    _take_inputs[(-(-len(into) // 512),)](
        ring, turn, last_tokens, tables, into, len(into), ring.shape[1], rows, stride, SLOTS=slots, PLACES=places,
        VALUES=values, BLOCK=512, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocab"])
def _embed(ids_ptr, weight_ptr, out_ptr, vocab, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs_alone(PDL)
    token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), vocab - 1).to(tl.int64)
    found = tl.load(weight_ptr + token * stride + at, mask=at < size, other=0.0)
    tl.store(out_ptr + row * size + at, found, mask=at < size)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(  # type: ignore[no-untyped-def]
    h_ptr, x_ptr, xs_ptr, ws_ptr, bias_ptr, post_ptr, w_ptr, out_ptr, scale_ptr, rows, size, eps, P: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POST: tl.constexpr, GEMMA: tl.constexpr, TO_FP8: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: h += [norm of] x, which is a sum of P parts, in place; out = norm of h."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    kind: tl.constexpr = h_ptr.dtype.element_ty
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    await_inputs(PDL)
    h = tl.load(h_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)
    if P > 0:
        x = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(P):
            x += tl.load(x_ptr + (part * rows + row) * size + at, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            x *= tl.load(xs_ptr + row) * tl.load(ws_ptr)
        if HAS_BIAS:
            x += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
        if HAS_POST:
            post = tl.load(post_ptr + at, mask=mask, other=0.0).to(tl.float32)
            x = normed(x, post, size, eps, kind, GEMMA).to(tl.float32)
        h = (h + x).to(kind)
        tl.store(h_ptr + row * size + at, h, mask=mask)
        h = h.to(tl.float32)
    out = normed(h, w, size, eps, kind, GEMMA)
    if TO_FP8:
        store_fp8(out.to(tl.float32), out_ptr, scale_ptr, row, size, at, mask)
    else:
        tl.store(out_ptr + row * size + at, out, mask=mask)


@triton.jit
def _act_mul(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(x_ptr + row * 2 * size + at, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + at, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + at, activated(gate, up, gate.dtype, GELU), mask=mask)


@triton.jit
def _act_mul_fp8(  # type: ignore[no-untyped-def]
    x_ptr, xs_ptr, ws_ptr, out_ptr, scale_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr, NUM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row, whose scale needs all of it: held in NUM blocks of the model's precision, few registers to a thread."""
    row = tl.program_id(0).to(tl.int64)
    gate_scale, up_scale = tl.load(ws_ptr), tl.load(ws_ptr + size)
    await_inputs(PDL)
    x_scale = tl.load(xs_ptr + row)
    most = tl.zeros([BLOCK], tl.float32)
    made = ()
    for block in tl.static_range(NUM):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < size
        gate = tl.load(x_ptr + row * 2 * size + at, mask=mask, other=0.0)
        up = tl.load(x_ptr + row * 2 * size + size + at, mask=mask, other=0.0)
        gate = scaled(gate, x_scale * gate_scale, ws_ptr, at, mask, False)
        up = scaled(up, x_scale * up_scale, ws_ptr, at, mask, False)
        out = activated(gate, up, gate.dtype, GELU)
        most = tl.maximum(most, tl.abs(out.to(tl.float32)))
        made = made + (out,)  # type: ignore[assignment]
    largest = tl.max(most, axis=0)
    for block in tl.static_range(NUM):
        at = block * BLOCK + tl.arange(0, BLOCK)
        store_scaled(made[block].to(tl.float32), largest, out_ptr, scale_ptr, row, size, at, at < size)


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    qkv_ptr, xs_ptr, ws_ptr, bias_ptr, cos_ptr, sin_ptr, pos_ptr, slot_ptr, qw_ptr, kw_ptr, eps, keys_ptr, values_ptr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its query and key heads are turned together, and its values go along into the cache."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < H + K) & (at < D // 2)
    x_ptr = qkv_ptr + row * (H + 2 * K) * D
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(pos_ptr + row)
    a = tl.load(x_ptr + head * D + at, mask=inside, other=0.0)
    b = tl.load(x_ptr + head * D + D // 2 + at, mask=inside, other=0.0)
    if SCALED:
        x_scale = tl.load(xs_ptr + row)
        scales = x_scale * tl.where(head < H, tl.load(ws_ptr), tl.load(ws_ptr + H * D))
        a = scaled(a, scales, bias_ptr, head * D + at, inside, HAS_BIAS)
        b = scaled(b, scales, bias_ptr, head * D + D // 2 + at, inside, HAS_BIAS)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    half = at < D // 2
    if HAS_NORM:
        scale = 1.0 / tl.sqrt_rn((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
        q_wa = tl.load(qw_ptr + at, mask=half, other=0.0).to(tl.float32)
        q_wb = tl.load(qw_ptr + D // 2 + at, mask=half, other=0.0).to(tl.float32)
        k_wa = tl.load(kw_ptr + at, mask=half, other=0.0).to(tl.float32)
        k_wb = tl.load(kw_ptr + D // 2 + at, mask=half, other=0.0).to(tl.float32)
        wa = tl.where(head < H, q_wa, k_wa)
        wb = tl.where(head < H, q_wb, k_wb)
        a = ((a * scale).to(kind).to(tl.float32) * wa).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * wb).to(kind).to(tl.float32)
    ra, rb = turned(a, b, cos_ptr + position * D, sin_ptr + position * D, at, half, kind, D)
    is_query = inside & (head < H)
    tl.store(x_ptr + head * D + at, ra, mask=is_query)
    tl.store(x_ptr + head * D + D // 2 + at, rb, mask=is_query)
    is_key = inside & (head >= H)
    to = keys_ptr + (slot * K + head - H) * D + at
    tl.store(to, cached(ra, keys_ptr), mask=is_key)
    tl.store(to + D // 2, cached(rb, keys_ptr), mask=is_key)
    value = tl.arange(0, KP)[:, None]
    has_value = (value < K) & half
    to = values_ptr + (slot * K + value) * D + at
    for half_at in tl.static_range(0, D, D // 2):
        here = (H + K + value) * D + half_at + at
        v = tl.load(x_ptr + here, mask=has_value, other=0.0)
        if SCALED:
            v = scaled(v, x_scale * tl.load(ws_ptr + (H + K) * D), bias_ptr, here, has_value, HAS_BIAS)
        tl.store(to + half_at, cached(v, values_ptr), mask=has_value)


@triton.jit
def _prefill(  # type: ignore[no-untyped-def]
    q_ptr, q_stride, keys_ptr, values_ptr, tables_ptr, table_stride, rows_ptr, starts_ptr, lens_ptr, tiles_ptr, out_ptr,
    sinks_ptr, scale, window, cap, heads, kv_heads,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + tile * 2)
    offset = tl.load(tiles_ptr + tile * 2 + 1)
    start = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - start
    length = tl.load(lens_ptr + seq)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    m = offset + tl.arange(0, TILE_M)
    d = tl.arange(0, DP)
    position = length - count + m
    q_at = (start + m).to(tl.int64)
    inside_q = (m < count)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at[:, None] * q_stride + head * D + d[None, :], mask=inside_q, other=0.0)
    top = tl.full([TILE_M], -1e30, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    if HAS_SINKS:  # a key that was seen before all others, without a value
        top = tl.zeros([TILE_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32)
        total = tl.full([TILE_M], 1.0, tl.float32)
    end = tl.minimum(length, length - count + offset + TILE_M)
    begin, first = 0, 0
    if HAS_WINDOW:
        begin = tl.maximum(length - count + offset - window + 1, 0) // TILE * TILE
        first = position[:, None] - window + 1
    table = tables_ptr + row * table_stride
    acc, top, total = attend(
        q, keys_ptr, values_ptr, table, head // (heads // kv_heads), begin, end, first, position[:, None], top, total,
        scale, cap, kv_heads, D, DP, BLOCK_SIZE, TILE, HAS_CAP, WIDEN, PRECISION,
    )  # fmt: skip
    out = (acc / total[:, None]).to(q.dtype)
    tl.store(out_ptr + (q_at[:, None] * heads + head) * D + d[None, :], out, mask=inside_q)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, b_ptr, out_ptr, rows, num_out, num_in, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    n = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for at in range(0, num_in, K):
        inside = at + k < num_in
        x = tl.load(
            x_ptr + m[:, None] * num_in + at + k[None, :],
            mask=(m < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            w_ptr + n[None, :] * num_in + at + k[:, None],
            mask=(n < num_out)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(b_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + m[:, None] * num_out + n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < rows)[:, None] & (n < num_out)[None, :],
    )


def invariant_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ weight.T [in, out] with one tile shape for every number of rows."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, num_in = x.shape
    num_out = weight.shape[0]
    out = torch.empty(rows, num_out, dtype=x.dtype, device=x.device)
    grid = (-(-num_out // 128), -(-rows // 64))
    _product[grid](
        x, weight, bias, out, rows, num_out, num_in, HAS_BIAS=bias is not None, PRECISION=precision(x.dtype),
        M=64, N=128, K=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def add_norm(
    hidden_BE: Tensor,
    parts: Tensor | None,
    scales: ProductScales,
    post: Norm | None,
    norm: Norm,
    *,
    to_fp8: bool,
) -> Activations:
    """hidden += Σ parts [P, B, E], or one [B, E], with what it lacks (normed first by `post`), in place; returns
    norm(hidden)."""
    rows, size = hidden_BE.shape
    made = Fp8Rows.empty(hidden_BE.shape, hidden_BE.device) if to_fp8 else torch.empty_like(hidden_BE)
    num_parts, num_warps = 1, 4 if size <= 2048 and rows <= FEW_PROGRAMS else 8
    if parts is None:
        num_parts = 0
    elif parts.ndim == 3:  # all are asked for at one time
        num_parts, num_warps = len(parts), 16
    _add_norm[(rows,)](
        hidden_BE, parts, *scales, None if post is None else post.weight, norm.weight, *values_and_scales(made),
        rows, size, norm.eps, P=num_parts, SCALED=scales.x_B is not None, HAS_BIAS=scales.bias_N is not None,
        HAS_POST=post is not None, GEMMA=norm.is_offset, TO_FP8=to_fp8, BLOCK=power_of_2(size), num_warps=num_warps,
        **early_launch(hidden_BE.device),
    )  # fmt: skip
    return made


class TritonKernels:
    """DecoderOps on CUDA."""

    def __init__(self, decode: DecodeAttention) -> None:
        self._decode = decode

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def embed(self, ids_N: Tensor, weight_VE: Tensor) -> Tensor:
        vocab, size = weight_VE.shape
        out = weight_VE.new_empty(len(ids_N), size)
        _embed[(len(ids_N), -(-size // 2048))](
            ids_N,
            weight_VE,
            out,
            vocab,
            weight_VE.stride(0),
            size,
            BLOCK=2048,
            num_warps=4,
            **early_launch(ids_N.device),
        )
        return out

    def add_norm(
        self, hidden: Tensor, addend: Tensor | None, norm: Norm, scales: ProductScales = NO_SCALES
    ) -> Any:
        """`scales`: that the product `addend` lacks; the result has 8 bits then, unless the head reads it."""
        to_fp8 = scales.x_B is not None and not norm.is_last
        return add_norm(hidden, addend, scales, None, norm, to_fp8=to_fp8)

    def act_mul(self, gate_up: Tensor, scales: ProductScales = NO_SCALES, *, gelu: bool) -> Any:
        """`scales`: that the product lacks; the result has 8 bits then."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        early = early_launch(gate_up.device)
        if scales.x_B is None:
            out = gate_up.new_empty(rows, width)
            _act_mul[(rows, -(-width // 2048))](
                gate_up,
                out,
                width,
                GELU=gelu,
                BLOCK=2048,
                num_warps=8 if rows <= 2 * FEW_PROGRAMS else 4,
                **early,
            )
            return out
        made, block = Fp8Rows.empty((rows, width), gate_up.device), min(2048, power_of_2(width))
        _act_mul_fp8[(rows,)](
            gate_up, scales.x_B, scales.weight_N, *made, width, GELU=gelu, BLOCK=block, NUM=-(-width // block),
            num_warps=32 if rows <= FEW_PROGRAMS else 8, **early,
        )  # fmt: skip
        return made

    def rope_store(
        self,
        qkv: Tensor,
        rows: CacheRows,
        num_heads: int,
        norms: HeadNorms | None,
        scales: ProductScales = NO_SCALES,
    ) -> None:
        """`scales`: that the product qkv lacks."""
        kv_heads, dim = rows.keys.shape[2:]
        q_norm, k_norm = (None, None) if norms is None else (norms.query.weight, norms.key.weight)
        eps = 0.0 if norms is None else norms.query.eps
        num_turned = power_of_2(num_heads + kv_heads)
        _rope_store[(qkv.shape[0],)](
            qkv, *scales, *rows[:4], q_norm, k_norm, eps, *rows[4:], H=num_heads, K=kv_heads, D=dim,
            HP=num_turned, KP=power_of_2(kv_heads), HALF=power_of_2(dim // 2), HAS_NORM=q_norm is not None,
            SCALED=scales.x_B is not None, HAS_BIAS=scales.bias_N is not None,
            num_warps=4 if num_turned * dim <= 4096 else 8, **early_launch(qkv.device),
        )  # fmt: skip

    def attend(
        self, query_NW: Tensor, num_heads: int, cache: LayerCache, batch: PagedBatch, rule: ScoreRule
    ) -> Tensor:
        _, block_size, kv_heads, dim = cache.keys.shape
        out = query_NW.new_empty(len(query_NW), num_heads, dim)
        tables, rows, lens = batch.block_tables_BM, batch.table_rows_B, batch.context_lens_B
        assert rows is not None
        if batch.num_decodes:
            assert batch.decode_work is not None
            self._decode(query_NW, cache, tables, batch.decode_work, out, rule)
        if batch.prefill_tiles is not None:
            scale, window, softcap, sinks_H = rule
            keys, values, widen = as_read(*cache, query_NW)
            _prefill[(batch.prefill_tiles.shape[0], num_heads)](
                query_NW, query_NW.shape[1], keys, values, tables, tables.stride(0), rows, batch.query_starts_B1, lens,
                batch.prefill_tiles, out, sinks_H, scale, window, softcap, num_heads, kv_heads, D=dim,
                DP=self._decode.dim_padded, BLOCK_SIZE=block_size, TILE_M=PREFILL_TILE, TILE=64, HAS_WINDOW=window > 0,
                HAS_CAP=softcap > 0, HAS_SINKS=sinks_H is not None, WIDEN=widen,
                PRECISION=precision(query_NW.dtype), num_warps=4, num_stages=2,
            )  # fmt: skip
        return out
