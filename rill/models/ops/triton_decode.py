"""Decode attention over the paged cache: one query per row, every key/value head read once.

There is one program for each entry of the work list (rill.models.decode.decode_work) and key/value head; on Hopper
rill.models.ops.cuda_decode takes that part. Where rows are cut, a launch behind it joins their pieces, in their order;
a row has the same bits whatever the batch, unless the caller can do without.
What a group of rows has in common is read once for all of them by a launch before, whose parts are joined too.
The list is data: a captured graph serves every mixture of lengths whose list fits its number of programs.

Axes: B row, H query head, K key/value head, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rill.models.decode.attention_paged import LayerCache
from rill.models.decode.decode_work import GROUP_ROWS, MAX_PIECES, TILE, WORDS, DecodeWork, Run
from rill.models.eager import ScoreRule
from rill.models.ops import cuda_decode
from rill.models.ops.triton_fp8 import as_read, widened_pairs
from rill.models.ops.triton_language import await_inputs, early_launch, power_of_2, precision, tl, triton

FEW_ROWS = 64
"""Up to so many, a program joins all pieces of one head of a row at one time."""


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    part_ptr, stat_ptr, pieces_ptr, out_ptr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MAX_PIECES: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: their pieces become their output."""
    row = tl.program_id(0).to(tl.int64)
    num_pieces = tl.load(pieces_ptr + row)
    await_inputs(PDL)  # every program: whoever comes next waits for this kernel alone
    if num_pieces > 1:
        head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DP)
        top = tl.full([HEADS], -1e30, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        out = tl.zeros([HEADS, DP], tl.float32)
        for first in range(0, num_pieces, AT_ONCE):
            n = first + tl.arange(0, AT_ONCE)
            there = (head < H)[:, None] & (n < num_pieces)[None, :]
            at = ((row * H + head) * MAX_PIECES)[:, None] + n[None, :]
            tops = tl.load(stat_ptr + at * 2, mask=there, other=-1e30)
            sums = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0)
            parts = tl.load(part_ptr + at[:, :, None] * DP + d, mask=there[:, :, None], other=0.0)
            before, top = top, tl.maximum(top, tl.max(tops, axis=1))
            keep, shares = tl.exp(before - top), tl.exp(tops - top[:, None])
            total = total * keep + tl.sum(shares * sums, axis=1)
            out = out * keep[:, None] + tl.sum(shares[:, :, None] * parts, axis=1)
        to = out_ptr + ((row * H + head) * D)[:, None] + d[None, :]
        out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(to, out, mask=(head < H)[:, None] & (d < D)[None, :])


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q, keys_ptr, values_ptr, table, kv, begin, end, first, last, top, total, scale, cap, K, D: tl.constexpr,
    DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries over tokens [begin, end): (Σ of values, largest score, Σ of weights). They see tokens first … last, which
    are numbers, or [M, 1] of each query's own.

    WIDEN == 2: numbers of 8 bits are read two at a time, as 16 bits, which the way to the tensor cores can turn; the
    even and the odd ones are multiplied apart, in float16, and put together at the end.
    """
    PER: tl.constexpr = 2 if WIDEN == 2 else 1
    d = tl.arange(0, DP // PER)
    acc = tl.zeros([q.shape[0], DP // PER], tl.float32)
    if WIDEN == 2:
        odd_acc = tl.zeros([q.shape[0], DP // PER], tl.float32)
        even_q, odd_q = tl.split(tl.reshape(q.to(tl.float16), (q.shape[0], DP // 2, 2)))
    for at in range(begin, end, TILE):
        t = at + tl.arange(0, TILE)
        block = tl.load(table + t // BLOCK_SIZE, mask=t < end, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + t % BLOCK_SIZE
        where = (slot * K + kv)[:, None] * (D // PER) + d[None, :]
        inside = (t < end)[:, None] & (d < D // PER)[None, :]
        k = tl.load(keys_ptr + where, mask=inside, other=0.0)
        v = tl.load(values_ptr + where, mask=inside, other=0.0)
        if WIDEN == 2:
            k, odd_k = widened_pairs(k)
            v, odd_v = widened_pairs(v)
            s = tl.dot(odd_q, tl.trans(odd_k), tl.dot(even_q, tl.trans(k))) * scale
        else:
            if WIDEN == 1:
                k = k.to(tl.float32).to(q.dtype)
                v = v.to(tl.float32).to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            s = cap * (1.0 - 2.0 / (tl.exp(2.0 * s / cap) + 1.0))
        seen = (t[None, :] >= first) & (t[None, :] <= last)
        s = tl.where(seen, s, -1e30)
        best = tl.maximum(top, tl.max(s, axis=1))
        p = tl.where(seen, tl.exp(s - best[:, None]), 0.0)
        keep = tl.exp(top - best)
        total = total * keep + tl.sum(p, axis=1)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        if WIDEN == 2:
            odd_acc = odd_acc * keep[:, None] + tl.dot(p.to(v.dtype), odd_v, input_precision=PRECISION)
        top = best
    if WIDEN == 2:
        acc = tl.reshape(tl.join(acc, odd_acc), (q.shape[0], DP))
    return acc, top, total


@triton.jit(do_not_specialize=["first_entry", "first_row"])
def _decode(  # type: ignore[no-untyped-def]
    q_ptr, q_stride, keys_ptr, values_ptr, tables_ptr, table_stride, work_ptr, first_entry, first_row, members_ptr,
    out_ptr, part_ptr, stat_ptr, sinks_ptr, scale, window, cap,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, GJ: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MAX_PIECES: tl.constexpr, WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One piece of a row's own tokens. ROWS > 1: of those that a group of rows shares, for all of their queries; such
    parts are joined to the rows' own."""
    G: tl.constexpr = H // K
    kv = tl.program_id(0) % K
    entry = work_ptr + (first_entry + tl.program_id(0) // K) * WORDS
    seq = tl.load(entry)
    piece = tl.load(entry + 1)
    num_pieces = tl.load(entry + 2) + tl.load(entry + 7)
    table = tables_ptr + tl.load(entry + 3).to(tl.int64) * table_stride
    begin = tl.load(entry + 4)
    end = tl.load(entry + 5)
    if end > begin:  # an empty entry waits for nothing and makes room
        first = 0
        if HAS_WINDOW:
            # Whole tiles before it are skipped; tiles keep their places, so the order of the rest is the same.
            first = tl.maximum(tl.load(entry + 6) - window, 0)
            begin = tl.maximum(begin, first // TILE * TILE)
        m, d = tl.arange(0, M), tl.arange(0, DP)
        if ROWS > 1:
            head = kv * G + m % GJ
            row = tl.load(members_ptr + seq * ROWS + m // GJ).to(tl.int64)
            is_mine = (row >= 0) & (m % GJ < G)
        else:
            head = kv * G + m
            row = seq.to(tl.int64)
            is_mine = m < G
        inside = is_mine[:, None] & (d < D)[None, :]
        await_inputs(PDL)
        q = tl.load(q_ptr + (row * q_stride + head * D)[:, None] + d[None, :], mask=inside, other=0.0)
        top = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        if HAS_SINKS:  # a key that was seen before all others, without a value: of the first piece
            sink = tl.load(sinks_ptr + head, mask=is_mine, other=0.0).to(tl.float32)
            top = tl.where(piece == 0, sink, top)
            total = tl.where(piece == 0, 1.0, total)
        acc, top, total = attend(
            q, keys_ptr, values_ptr, table, kv, begin, end, first, end - 1, top, total, scale, cap, K, D, DP,
            BLOCK_SIZE, TILE, HAS_CAP, WIDEN, PRECISION,
        )  # fmt: skip
        at = ((row - first_row) * H + head) * MAX_PIECES + piece
        if (ROWS > 1) | (num_pieces > 1):
            tl.store(part_ptr + at[:, None] * DP + d[None, :], acc, mask=is_mine[:, None])
            tl.store(stat_ptr + at * 2, top, mask=is_mine)
            tl.store(stat_ptr + at * 2 + 1, total, mask=is_mine)
        else:
            to = out_ptr + (row * H + head)[:, None] * D + d[None, :]
            tl.store(to, (acc / total[:, None]).to(q.dtype), mask=inside)


class DecodeAttention:
    """Buffers for the pieces of up to max_rows rows, made once so that graphs can refer to them.

    uses_copies: what cuda_decode can do is done by it.
    is_invariant: a row's sums come in one order, however many rows there are.
    """

    uses_copies, is_invariant = False, True

    num_warps = 4
    num_stages = {0: 3, 1: 3, 2: 4}
    """By how numbers are read (as_read); found by trying, on an H200."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, max_rows: int, device: torch.device
    ) -> None:
        self._heads, self._kv_heads = num_heads, num_kv_heads
        self._dim, self.dim_padded = head_dim, max(16, power_of_2(head_dim))
        parts = max_rows * num_heads * MAX_PIECES
        self._part = torch.empty(parts * self.dim_padded, dtype=torch.float32, device=device)
        self._stat = torch.empty(parts * 2, dtype=torch.float32, device=device)

    def __call__(
        self,
        query_BW: Tensor,
        cache: LayerCache,
        tables: Tensor,
        work: DecodeWork,
        out: Tensor,
        rule: ScoreRule,
    ) -> None:
        """The rows of `out` that the work names."""
        scale, window, softcap, sinks_H = rule
        group, block_size = self._heads // self._kv_heads, cache.keys.shape[1]
        keys, values, widen = as_read(*cache, query_BW)
        joined = max(2, power_of_2(group))

        def launch(entries: Tensor, run: Run, **rows: int) -> None:
            _decode[(run.num_entries * self._kv_heads,)](
                query_BW, query_BW.shape[1], keys, values, tables, tables.stride(0), entries, run.first_entry,
                run.first_row, work.members, out, self._part, self._stat, sinks_H, scale, window, softcap,
                H=self._heads, K=self._kv_heads, D=self._dim, DP=self.dim_padded, GJ=joined, BLOCK_SIZE=block_size,
                TILE=TILE, MAX_PIECES=MAX_PIECES, WORDS=WORDS, HAS_WINDOW=window > 0, HAS_CAP=softcap > 0,
                HAS_SINKS=sinks_H is not None, WIDEN=widen, PRECISION=precision(query_BW.dtype),
                num_stages=self.num_stages[widen] if query_BW.dtype.itemsize == 2 else 2,
                **rows, **early_launch(query_BW.device),
            )  # fmt: skip

        if work.shared is not None:
            assert window == 0, "rows with a window share nothing"
            launch(
                work.shared,
                Run(0, 0, 0, len(work.shared)),
                ROWS=GROUP_ROWS,
                M=GROUP_ROWS * joined,
                num_warps=8,
            )
        uses_copies = self.uses_copies and cuda_decode.covers(query_BW, cache, rule)
        for run in work.runs:
            if uses_copies:
                cuda_decode.decode(
                    query_BW, cache, tables, work, run, self._heads, out, self._part, self._stat, scale
                )
            else:
                launch(work.entries, run, ROWS=1, M=max(16, power_of_2(group)), num_warps=self.num_warps)
            if work.pieces is not None:
                rows = slice(run.first_row, run.first_row + run.num_rows)
                # Of few rows all have pieces, and each is in a hurry; of many most have none.
                is_many = run.num_rows > FEW_ROWS and not self.is_invariant
                heads, at_once = (4, 4) if is_many else (1, MAX_PIECES)
                _join[(run.num_rows, -(-self._heads // heads))](
                    self._part, self._stat, work.pieces[rows], out[rows], H=self._heads, D=self._dim,
                    DP=self.dim_padded, MAX_PIECES=MAX_PIECES, HEADS=heads, AT_ONCE=at_once,
                    num_warps=heads * max(1, self.dim_padded // 128), **early_launch(query_BW.device),
                )  # fmt: skip
