"""CUDA kernels in Triton: paged attention, norms, rotary embedding, activation, invariant products.

`TritonKernels` offers the same calls as rill.models.cpu_kernels.CpuKernels, so the fused decoder and the registered
attention run on either. Nothing here synchronises with the host, so all of it can be captured in a CUDA graph.

Decode attention reads each key/value head once for all query heads that share it, and cuts long contexts into
pieces of SPLIT tokens that run in parallel. The cut depends on a sequence's own length alone: a row has the same
bits whatever the batch.

Axes: N token of the flat batch, B sequence, H query head, K key/value head, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from rill.errors import MissingExtraError
from rill.models.attention_paged import PagedBatch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "the CUDA engine needs Triton, which comes with torch's CUDA builds: install torch for CUDA"
    ) from error

__all__ = ["PREFILL_TILE", "SPLIT", "TritonKernels", "invariant_matmul", "tl", "triton"]

SPLIT = 512
PREFILL_TILE = 64


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    h_ptr, x_ptr, w_ptr, out_ptr, size, eps, HAS_X: tl.constexpr, GEMMA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    h = tl.load(h_ptr + row * size + at, mask=mask, other=0.0)
    kind = h.dtype
    h = h.to(tl.float32)
    if HAS_X:
        h = (h + tl.load(x_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)).to(kind)
        tl.store(h_ptr + row * size + at, h, mask=mask)
        h = h.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(h * h, axis=0) / size + eps)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if GEMMA:
        out = h * scale * (1.0 + w)
    else:
        out = (h * scale).to(kind).to(tl.float32) * w
    tl.store(out_ptr + row * size + at, out.to(kind), mask=mask)


@triton.jit
def _act_mul(x_ptr, out_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(x_ptr + row * 2 * size + at, mask=mask, other=0.0)
    kind = gate.dtype
    up = tl.load(x_ptr + row * 2 * size + size + at, mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    if GELU:
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        act = g / (1.0 + tl.exp(-2.0 * z))
    else:
        act = g / (1.0 + tl.exp(-g))
    tl.store(out_ptr + row * size + at, (act.to(kind).to(tl.float32) * up).to(kind), mask=mask)


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, pos_ptr, slot_ptr, qw_ptr, kw_ptr, eps, keys_ptr, values_ptr, heads, kv_heads,
    D: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HALF)
    mask = at < D // 2
    x_ptr = qkv_ptr + row * (heads + 2 * kv_heads) * D + head * D
    a = tl.load(x_ptr + at, mask=mask, other=0.0)
    b = tl.load(x_ptr + D // 2 + at, mask=mask, other=0.0)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if HAS_NORM:
        w_ptr = qw_ptr if head < heads else kw_ptr
        scale = 1.0 / tl.sqrt_rn((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
        wa = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
        wb = tl.load(w_ptr + D // 2 + at, mask=mask, other=0.0).to(tl.float32)
        a = ((a * scale).to(kind).to(tl.float32) * wa).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * wb).to(kind).to(tl.float32)
    position = tl.load(pos_ptr + row)
    ca = tl.load(cos_ptr + position * D + at, mask=mask, other=0.0).to(tl.float32)
    cb = tl.load(cos_ptr + position * D + D // 2 + at, mask=mask, other=0.0).to(tl.float32)
    sa = tl.load(sin_ptr + position * D + at, mask=mask, other=0.0).to(tl.float32)
    sb = tl.load(sin_ptr + position * D + D // 2 + at, mask=mask, other=0.0).to(tl.float32)
    ra = ((a * ca).to(kind).to(tl.float32) - (b * sa).to(kind).to(tl.float32)).to(kind)
    rb = ((b * cb).to(kind).to(tl.float32) + (a * sb).to(kind).to(tl.float32)).to(kind)
    if head < heads:
        tl.store(x_ptr + at, ra, mask=mask)
        tl.store(x_ptr + D // 2 + at, rb, mask=mask)
    else:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        to = (slot * kv_heads + head - heads) * D
        tl.store(keys_ptr + to + at, ra, mask=mask)
        tl.store(keys_ptr + to + D // 2 + at, rb, mask=mask)
        v_ptr = x_ptr + kv_heads * D
        tl.store(values_ptr + to + at, tl.load(v_ptr + at, mask=mask), mask=mask)
        tl.store(values_ptr + to + D // 2 + at, tl.load(v_ptr + D // 2 + at, mask=mask), mask=mask)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    q_ptr, q_stride, keys_ptr, values_ptr, tables_ptr, table_stride, rows_ptr, lens_ptr, out_ptr, part_ptr, stat_ptr,
    scale, window, cap, num_splits, heads, kv_heads,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    seq, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    begin = split * SPLIT
    if begin < length:
        end = tl.minimum(begin + SPLIT, length)
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(length - window, 0)
        row = tl.load(rows_ptr + seq).to(tl.int64)
        g = tl.arange(0, GP)
        d = tl.arange(0, DP)
        head = kv * G + g
        q = tl.load(
            q_ptr + seq.to(tl.int64) * q_stride + head[:, None] * D + d[None, :],
            mask=(g < G)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        top = tl.full([GP], -1e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, DP], tl.float32)
        # Whole tiles before the window are skipped; tiles keep their places, so the order of the rest is the same.
        lo = tl.maximum(begin, first // TILE * TILE)
        for at in range(lo, end, TILE):
            t = at + tl.arange(0, TILE)
            seen = (t < end) & (t >= first)
            block = tl.load(tables_ptr + row * table_stride + t // BLOCK_SIZE, mask=seen, other=0).to(
                tl.int64
            )
            slot = block * BLOCK_SIZE + t % BLOCK_SIZE
            where = (slot * kv_heads + kv)[:, None] * D + d[None, :]
            inside = seen[:, None] & (d < D)[None, :]
            k = tl.load(keys_ptr + where, mask=inside, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if HAS_CAP:
                s = cap * (1.0 - 2.0 / (tl.exp(2.0 * s / cap) + 1.0))
            s = tl.where(seen[None, :], s, -1e30)
            best = tl.maximum(top, tl.max(s, axis=1))
            p = tl.where(seen[None, :], tl.exp(s - best[:, None]), 0.0)
            keep = tl.exp(top - best)
            v = tl.load(values_ptr + where, mask=inside, other=0.0)
            total = total * keep + tl.sum(p, axis=1)
            acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = best
        if length <= SPLIT:
            out = (acc / total[:, None]).to(q.dtype)
            tl.store(
                out_ptr + (seq.to(tl.int64) * heads + head[:, None]) * D + d[None, :], out,
                mask=(g < G)[:, None] & (d < D)[None, :],
            )  # fmt: skip
        else:
            part = (seq.to(tl.int64) * heads + head) * num_splits + split
            tl.store(part_ptr + part[:, None] * DP + d[None, :], acc, mask=(g < G)[:, None])
            tl.store(stat_ptr + part * 2, top, mask=g < G)
            tl.store(stat_ptr + part * 2 + 1, total, mask=g < G)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    lens_ptr, out_ptr, part_ptr, stat_ptr, num_splits, heads,
    D: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lens_ptr + seq)
    if length > SPLIT:
        d = tl.arange(0, DP)
        base = (seq * heads + head) * num_splits
        top = -1e30
        total = 0.0
        acc = tl.zeros([DP], tl.float32)
        for split in range(tl.cdiv(length, SPLIT)):
            t = tl.load(stat_ptr + (base + split) * 2)
            n = tl.load(stat_ptr + (base + split) * 2 + 1)
            a = tl.load(part_ptr + (base + split) * DP + d)
            best = tl.maximum(top, t)
            old, new = tl.exp(top - best), tl.exp(t - best)
            total = total * old + n * new
            acc = acc * old + a * new
            top = best
        out = (acc / total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (seq * heads + head) * D + d, out, mask=d < D)


@triton.jit
def _prefill(  # type: ignore[no-untyped-def]
    q_ptr, q_stride, keys_ptr, values_ptr, tables_ptr, table_stride, rows_ptr, starts_ptr, lens_ptr, tiles_ptr, out_ptr,
    scale, window, cap, heads, kv_heads,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + tile * 2)
    offset = tl.load(tiles_ptr + tile * 2 + 1)
    start = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - start
    length = tl.load(lens_ptr + seq)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    kv = head // (heads // kv_heads)
    m = offset + tl.arange(0, TILE_M)
    d = tl.arange(0, DP)
    position = length - count + m
    q_at = (start + m).to(tl.int64)
    inside_q = (m < count)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at[:, None] * q_stride + head * D + d[None, :], mask=inside_q, other=0.0)
    top = tl.full([TILE_M], -1e30, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DP], tl.float32)
    end = tl.minimum(length, length - count + offset + TILE_M)
    lo = 0
    if HAS_WINDOW:
        lo = tl.maximum(length - count + offset - window + 1, 0) // TILE * TILE
    for at in range(lo, end, TILE):
        t = at + tl.arange(0, TILE)
        block = tl.load(tables_ptr + row * table_stride + t // BLOCK_SIZE, mask=t < end, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + t % BLOCK_SIZE
        where = (slot * kv_heads + kv)[:, None] * D + d[None, :]
        inside = (t < end)[:, None] & (d < D)[None, :]
        k = tl.load(keys_ptr + where, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            s = cap * (1.0 - 2.0 / (tl.exp(2.0 * s / cap) + 1.0))
        seen = (t[None, :] <= position[:, None]) & (t < end)[None, :]
        if HAS_WINDOW:
            seen = seen & (t[None, :] > position[:, None] - window)
        s = tl.where(seen, s, -1e30)
        best = tl.maximum(top, tl.max(s, axis=1))
        p = tl.where(seen, tl.exp(s - best[:, None]), 0.0)
        keep = tl.exp(top - best)
        v = tl.load(values_ptr + where, mask=inside, other=0.0)
        total = total * keep + tl.sum(p, axis=1)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = best
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


def invariant_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, in] @ weight.T [in, out] with one tile shape for every number of rows."""
    x = x.contiguous()
    rows, num_in = x.shape
    num_out = weight.shape[0]
    out = torch.empty(rows, num_out, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_out, 128), triton.cdiv(rows, 64))
    _product[grid](
        x, weight, bias, out, rows, num_out, num_in, HAS_BIAS=bias is not None, PRECISION=_precision(x.dtype),
        M=64, N=128, K=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype is torch.float32 else "tf32"


class TritonKernels:
    """DecoderOps and PagedKernels on CUDA. Buffers for split contexts are made once, for graphs to refer to."""

    def __init__(
        self, *, num_heads: int, head_dim: int, max_num_seqs: int, max_context: int, device: torch.device
    ) -> None:
        self.num_splits = triton.cdiv(max_context, SPLIT)
        self._dim_padded = max(16, triton.next_power_of_2(head_dim))
        self._max_rows = max_num_seqs
        parts = max_num_seqs * num_heads * self.num_splits if self.num_splits > 1 else 1
        self._part = torch.empty(parts * self._dim_padded, dtype=torch.float32, device=device)
        self._stat = torch.empty(parts * 2, dtype=torch.float32, device=device)

    def add_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool,
    ) -> torch.Tensor:
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        block = triton.next_power_of_2(size)
        _add_norm[(rows,)](
            hidden, addend, weight, out, size, eps, HAS_X=addend is not None, GEMMA=gemma, BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        return out

    def act_mul(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
        _act_mul[(rows, triton.cdiv(width // 2, 2048))](
            gate_up, out, width // 2, GELU=gelu, BLOCK=2048, num_warps=4
        )
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_heads: int,
    ) -> None:
        kv_heads, dim = keys.shape[2:]
        _rope_store[(qkv.shape[0], num_heads + kv_heads)](
            qkv, cos, sin, positions, slots, q_norm, k_norm, eps, keys, values, num_heads, kv_heads,
            D=dim, HALF=triton.next_power_of_2(dim // 2), HAS_NORM=q_norm is not None, num_warps=1,
        )  # fmt: skip

    def attend_flat(
        self,
        query: torch.Tensor,
        query_stride: int,
        num_heads: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        _, block_size, kv_heads, dim = keys.shape
        out = torch.empty(query.shape[0], num_heads, dim, dtype=query.dtype, device=query.device)
        shared: dict[str, Any] = {
            "D": dim, "DP": self._dim_padded, "BLOCK_SIZE": block_size, "HAS_WINDOW": window > 0,
            "HAS_CAP": softcap > 0, "PRECISION": _precision(query.dtype),
        }  # fmt: skip
        tables, rows, lens = batch.block_tables_BM, batch.table_rows_B, batch.context_lens_B
        assert rows is not None
        for start in range(0, batch.num_decodes, self._max_rows):
            end = min(start + self._max_rows, batch.num_decodes)
            self._decode_rows(
                query[start:], query_stride, num_heads, keys, values, tables, rows[start:], lens[start:], out[start:],
                end - start, batch.max_decode_context, scale, window, softcap, shared,
            )  # fmt: skip
        if batch.prefill_tiles is not None:
            _prefill[(batch.prefill_tiles.shape[0], num_heads)](
                query, query_stride, keys, values, tables, tables.stride(0), rows, batch.query_starts_B1, lens,
                batch.prefill_tiles, out, scale, window, softcap, num_heads, kv_heads, TILE_M=PREFILL_TILE, TILE=64,
                num_warps=4, num_stages=2, **shared,
            )  # fmt: skip
        return out

    def _decode_rows(
        self,
        query: torch.Tensor,
        query_stride: int,
        num_heads: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
        count: int,
        max_context: int,
        scale: float,
        window: int,
        softcap: float,
        shared: dict[str, Any],
    ) -> None:
        kv_heads, dim = keys.shape[2:]
        splits = triton.cdiv(max_context, SPLIT)
        group = num_heads // kv_heads
        _decode[(count, kv_heads, splits)](
            query, query_stride, keys, values, tables, tables.stride(0), rows, lens, out, self._part, self._stat,
            scale, window, softcap, self.num_splits, num_heads, kv_heads, G=group,
            GP=max(16, triton.next_power_of_2(group)), TILE=64, SPLIT=SPLIT, num_warps=4, num_stages=3, **shared,
        )  # fmt: skip
        if splits > 1:
            _join[(count, num_heads)](
                lens, out, self._part, self._stat, self.num_splits, num_heads, D=dim, DP=self._dim_padded, SPLIT=SPLIT,
                num_warps=1,
            )  # fmt: skip

    # --- PagedKernels -------------------------------------------------------------------------------------

    def store(
        self,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        keys.view(-1, *keys.shape[2:]).index_copy_(0, batch.slots_N, key_NKD)
        values.view(-1, *values.shape[2:]).index_copy_(0, batch.slots_N, value_NKD)

    def attend(
        self,
        query_NHD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        query = query_NHD.contiguous()
        heads, dim = query.shape[1:]
        return self.attend_flat(
            query, heads * dim, heads, keys, values, batch, scale=scale, window=window, softcap=softcap
        )
