"""Causal attention over the segments of a packed row, forward and backward, in Triton: CUDA in 16 bits.

Callers: rill.models.train.attention_packed. A segment's queries see the keys of that segment only; the last query
sees the last key (there may be more keys than queries: a shared prefix). Guarantees: results do not depend on how other
segments lie in the row, nothing is added atomically, so a step has the same bits each time it is run.

Work is a list of tiles made once per pack and used by every layer, dearest first: a row of log-normal lengths then
keeps all multiprocessors busy to the end, and no program starts only to find that its tile is empty.

    forward         a tile of queries   → out, log-sum-exp          QKᵀ, PV
    backward/queries a tile of queries  → dQ, Σ out · dO            QKᵀ, dOVᵀ, dSK
    backward/keys   a tile of keys      → dK, dV in parts           QKᵀ, dOVᵀ, PᵀdO, dSᵀQ

dK and dV of one key/value head are summed over its query heads: within a program over HEADS_AT_ONCE of them, the
rest as `parts` that are added afterwards, by a compiler together with what it does to the sum.

Q query token, M key token, H query head, G key/value head, E head width, C column of per-query sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

QUERY_TILE = 64
KEY_TILE = 64
HEADS_AT_ONCE = 3
_LOG2_E = 1.4426950408889634


STREAMED = 64
"""Rows that a program reads at a time of what it does not hold."""
# Measured on an H200 with heads of 128: two programs of four warps on a multiprocessor beat one of eight.
_FORWARD: dict[str, int] = {"num_warps": 4, "num_stages": 3}
_BACKWARD: dict[str, int] = {"num_warps": 4, "num_stages": 2}


def plan_tiles(
    query_lengths: Sequence[int], key_lengths: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(query tiles, key tiles): int32 [tiles, 6] of the segment's first query, number of queries, first key, number of
    keys, first column of per-query sums, and the tile's number in it.

    Sorted by the number of (query, key) pairs, most first. Sums lie tile by tile: the copy engine reads
    from multiples of 16 bytes only, and no program needs to mask them.
    """
    q, k = np.asarray(query_lengths), np.asarray(key_lengths)
    padded = -(-q // QUERY_TILE) * QUERY_TILE
    segments = np.stack([np.cumsum(q) - q, q, np.cumsum(k) - k, k, np.cumsum(padded) - padded], axis=1)
    hidden = segments[:, 3] - segments[:, 1]
    queries = _tiles(segments, q, QUERY_TILE)
    seen = np.minimum(
        queries[:, 3], (queries[:, 5] + 1) * QUERY_TILE + np.repeat(hidden, -(-q // QUERY_TILE))
    )
    keys = _tiles(segments, k, KEY_TILE)
    seeing = keys[:, 1] - np.maximum(0, keys[:, 5] * KEY_TILE - np.repeat(hidden, -(-k // KEY_TILE)))
    return queries[np.argsort(-seen, kind="stable")], keys[np.argsort(-seeing, kind="stable")]


def _tiles(segments: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    counts = -(-lengths // size)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.concatenate([np.repeat(segments, counts, axis=0), numbers[:, None]], axis=1).astype(np.int32)


@triton.jit
def _tile(tiles_ptr, lanes):  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    """(first query, queries, first key, keys, first sum, tile number, lane) of this program."""
    at = tiles_ptr + tl.program_id(0) // lanes * 6
    q_start, q_len, k_start, k_len = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return q_start, q_len, k_start, k_len, tl.load(at + 4), tl.load(at + 5), tl.program_id(0) % lanes


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(ptr, start, rows, end, head, num_heads, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = ((start + rows).to(tl.int64) * num_heads + head) * WIDTH
    return tl.load(ptr + at[:, None] + tl.arange(0, WIDTH)[None, :], mask=(rows < end)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(ptr, values, start, rows, end, head, num_heads, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = ((start + rows).to(tl.int64) * num_heads + head) * WIDTH
    to = ptr + at[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(to, values.to(ptr.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _sees(rows, keys, ahead, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a query sees a key; `rows` and `keys` count from the segment's start and are broadcast."""
    sees = rows + ahead >= keys
    if HAS_WINDOW:
        sees &= rows + ahead - window < keys
    return sees


@triton.jit  # type: ignore[untyped-decorator]
def _key_range(number, ahead, window, M: tl.constexpr, N: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first block of keys that a query tile needs, first one that not every query sees in full)."""
    begin = 0
    whole = (number * M + ahead + 1) // N * N
    if HAS_WINDOW:
        begin = tl.maximum(0, number * M + ahead - window + 1) // N * N
        whole = begin
    return begin, whole


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    q_ptr, k_rows, v_rows, out_ptr, lse_ptr, tiles_ptr, scale, window, sums_step, num_heads, group,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    q_start, q_len, k_start, k_len, sums, number, head = _tile(tiles_ptr, num_heads)
    rows, columns = number * M + tl.arange(0, M), tl.arange(0, N)
    ahead, kv_at = k_len - q_len, head // group * WIDTH
    q = _load_rows(q_ptr, q_start, rows, q_len, head, num_heads, WIDTH)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    begin, whole = _key_range(number, ahead, window, M, N, HAS_WINDOW)
    end = whole
    for masked in tl.static_range(2):
        for start in range(begin, end, N):
            k = k_rows.load([k_start + start, kv_at])
            v = v_rows.load([k_start + start, kv_at])
            scores = tl.dot(q, tl.trans(k)) * scale
            sees = _sees(rows[:, None], start + columns[None, :], ahead, window, HAS_WINDOW)
            if masked:
                scores = tl.where(sees, scores, -1.0e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            if HAS_WINDOW:
                p = tl.where(sees, p, 0.0)  # a query that sees nothing of this block has no largest score yet
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
            top = new_top
        begin, end = whole, tl.minimum(k_len, number * M + ahead + M)
    _store_rows(out_ptr, acc / total[:, None], q_start, rows, q_len, head, num_heads, WIDTH)
    # Past the segment's end an infinite one: whatever is read in place of such a query weighs nothing.
    lse = tl.where(rows < q_len, top + tl.log2(total), float("inf"))
    tl.store(lse_ptr + head * sums_step + sums + rows, lse)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_queries(  # type: ignore[no-untyped-def]
    q_ptr, k_rows, v_rows, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr, scale, window,
    sums_step, num_heads, group,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Also delta = Σ out · grad over the head's width."""
    q_start, q_len, k_start, k_len, sums, number, head = _tile(tiles_ptr, num_heads)
    rows, columns = number * M + tl.arange(0, M), tl.arange(0, N)
    ahead, kv_at = k_len - q_len, head // group * WIDTH
    q = _load_rows(q_ptr, q_start, rows, q_len, head, num_heads, WIDTH)
    grad = _load_rows(grad_ptr, q_start, rows, q_len, head, num_heads, WIDTH)
    out = _load_rows(out_ptr, q_start, rows, q_len, head, num_heads, WIDTH)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * sums_step + sums + rows, delta)
    lse = tl.load(lse_ptr + head * sums_step + sums + rows)
    dq = tl.zeros([M, WIDTH], tl.float32)
    begin, whole = _key_range(number, ahead, window, M, N, HAS_WINDOW)
    end = whole
    for masked in tl.static_range(2):
        for start in range(begin, end, N):
            k = k_rows.load([k_start + start, kv_at])
            v = v_rows.load([k_start + start, kv_at])
            p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
            if masked:
                p = tl.where(
                    _sees(rows[:, None], start + columns[None, :], ahead, window, HAS_WINDOW), p, 0.0
                )
            ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
        begin, end = whole, tl.minimum(k_len, number * M + ahead + M)
    _store_rows(dq_ptr, dq * (scale * 0.6931471805599453), q_start, rows, q_len, head, num_heads, WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_keys(  # type: ignore[no-untyped-def]
    q_rows, k_ptr, v_ptr, grad_rows, lse_rows, delta_rows, dk_ptr, dv_ptr, tiles_ptr, scale, window,
    num_keys, kv_heads, group,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    parts = group // HEADS
    q_start, q_len, k_start, k_len, sums, number, lane = _tile(tiles_ptr, kv_heads * parts)
    kv_head, part = lane // parts, lane % parts
    columns = number * N + tl.arange(0, N)
    k = _load_rows(k_ptr, k_start, columns, k_len, kv_head, kv_heads, WIDTH)
    v = _load_rows(v_ptr, k_start, columns, k_len, kv_head, kv_heads, WIDTH)
    dk = tl.zeros([N, WIDTH], tl.float32)
    dv = tl.zeros([N, WIDTH], tl.float32)
    ahead = k_len - q_len
    begin = tl.maximum(0, number * N - ahead) // M * M  # the first queries that see any of these keys
    end = q_len
    whole = tl.cdiv(tl.maximum(0, number * N + N - 1 - ahead), M) * M  # from here on they see all
    if HAS_WINDOW:
        end = tl.minimum(q_len, number * N + N + window - ahead)
        whole = end
    for index in range(HEADS):
        head = kv_head * group + part * HEADS + index
        first, last = begin, tl.minimum(whole, end)
        for masked in tl.static_range(1, -1, -1):
            for start in range(first, last, M):
                rows = start + tl.arange(0, M)
                q = q_rows.load([q_start + start, head * WIDTH])
                grad = grad_rows.load([q_start + start, head * WIDTH])
                lse = lse_rows.load([head, sums + start]).reshape([M])
                delta = delta_rows.load([head, sums + start]).reshape([M])
                p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
                if masked:
                    p = tl.where(_sees(rows[None, :], columns[:, None], ahead, window, HAS_WINDOW), p, 0.0)
                dv = tl.dot(p.to(q.dtype), grad, dv)
                ds = p * (tl.dot(v, tl.trans(grad)) - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk)
            first, last = whole, end
    k_start += part * num_keys
    _store_rows(dk_ptr, dk * (scale * 0.6931471805599453), k_start, columns, k_len, kv_head, kv_heads, WIDTH)
    _store_rows(dv_ptr, dv, k_start, columns, k_len, kv_head, kv_heads, WIDTH)


@torch.library.custom_op("rill::segment_attention", mutates_args=())
def segment_attention(
    query_QHE: Tensor,
    key_MGE: Tensor,
    value_MGE: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """(out_QHE, log-sum-exp in base 2 by tile). `window` 0: every earlier key is seen; else the last `window` ones."""
    q, k, v = query_QHE.contiguous(), key_MGE.contiguous(), value_MGE.contiguous()
    _, num_heads, width = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(num_heads, len(query_tiles) * QUERY_TILE, dtype=torch.float32, device=q.device)
    _forward[(len(query_tiles) * num_heads,)](
        q, _streamed(k), _streamed(v), out, lse, query_tiles, scale * _LOG2_E,
        window, lse.stride(0), num_heads, num_heads // k.shape[1],
        WIDTH=width, M=QUERY_TILE, N=STREAMED, HAS_WINDOW=window > 0, **_FORWARD,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("rill::segment_attention_backward", mutates_args=())
def segment_attention_backward(
    grad_QHE: Tensor,
    query_QHE: Tensor,
    key_MGE: Tensor,
    value_MGE: Tensor,
    out_QHE: Tensor,
    lse_HC: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK in parts, dV in parts): [parts, M, G, E], in float32 where there are several."""
    grad, q, k, v = (x.contiguous() for x in (grad_QHE, query_QHE, key_MGE, value_MGE))
    _, num_heads, width = q.shape
    num_keys, kv_heads, _ = k.shape
    group = num_heads // kv_heads
    dq, delta = torch.empty_like(q), torch.empty_like(lse_HC)
    dk, dv = _empty_parts(q, k), _empty_parts(q, v)
    parts = len(dk)
    _backward_queries[(len(query_tiles) * num_heads,)](
        q, _streamed(k), _streamed(v), out_QHE, grad, lse_HC, delta, dq, query_tiles,
        scale * _LOG2_E, window, delta.stride(0), num_heads, group,
        WIDTH=width, M=QUERY_TILE, N=STREAMED, HAS_WINDOW=window > 0, **_BACKWARD,
    )  # fmt: skip
    _backward_keys[(len(key_tiles) * kv_heads * parts,)](
        _streamed(q), k, v, _streamed(grad), _sums_of(lse_HC), _sums_of(delta), dk, dv,
        key_tiles, scale * _LOG2_E, window, num_keys, kv_heads, group,
        WIDTH=width, M=STREAMED, N=KEY_TILE, HEADS=group // parts, HAS_WINDOW=window > 0, **_BACKWARD,
    )  # fmt: skip
    return dq, dk, dv


def _empty_parts(query_QHE: Tensor, key_MGE: Tensor) -> Tensor:
    group = query_QHE.shape[1] // key_MGE.shape[1]
    parts = group // max(h for h in range(1, HEADS_AT_ONCE + 1) if group % h == 0)
    return key_MGE.new_empty(parts, *key_MGE.shape, dtype=key_MGE.dtype if parts == 1 else torch.float32)


def _streamed(x_THE: Tensor) -> TensorDescriptor:
    """STREAMED tokens of one head at a time through the bulk copy engine; past the last token it reads zeros."""
    num_tokens, num_heads, width = x_THE.shape
    return TensorDescriptor(x_THE, [num_tokens, num_heads * width], [num_heads * width, 1], [STREAMED, width])


def _sums_of(x_HC: Tensor) -> TensorDescriptor:
    return TensorDescriptor(x_HC, list(x_HC.shape), list(x_HC.stride()), [1, STREAMED])


@segment_attention.register_fake
def _(
    query_QHE: Tensor, key_MGE: Tensor, value_MGE: Tensor, query_tiles: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    lse = query_QHE.new_empty(query_QHE.shape[1], query_tiles.shape[0] * QUERY_TILE, dtype=torch.float32)
    return query_QHE.new_empty(query_QHE.shape), lse


@segment_attention_backward.register_fake
def _(
    grad_QHE: Tensor, query_QHE: Tensor, key_MGE: Tensor, value_MGE: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parts = (_empty_parts(query_QHE, x) for x in (key_MGE, value_MGE))
    return query_QHE.new_empty(query_QHE.shape), *parts  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad_QHE: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, query_tiles, key_tiles, out, lse = ctx.saved_tensors
    dq, *parts = segment_attention_backward(
        grad_QHE, q, k, v, out, lse, query_tiles, key_tiles, ctx.scale, ctx.window
    )
    dk, dv = (part[0] if len(part) == 1 else part.sum(0).to(q.dtype) for part in parts)
    return dq, dk, dv, None, None, None, None


segment_attention.register_autograd(_gradient, setup_context=_save)


@register_flop_formula(torch.ops.rill.segment_attention)
def _flops(query_shape: Any, key_shape: Any, *args: Any, **kwargs: Any) -> int:
    """A guess (the lengths are on the device) that keeps the compiler from computing attention twice."""
    num_queries, num_heads, width = query_shape
    return int(4 * num_queries * num_heads * width * 1024)
