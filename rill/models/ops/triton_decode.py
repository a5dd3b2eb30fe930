"""Decode attention over the paged cache, in one launch: one query per row, every key/value head read once.

There is one program for each entry of the work list (rill.models.decode.decode_work) and key/value head. The program
that finishes a row's last piece joins them, in the order of the pieces, so a row has the same bits whatever the batch.
What a group of rows has in common is read once for all of them by a launch before, whose parts are joined too.
The list is data: a captured graph serves every mixture of lengths whose list fits its number of programs.

Axes: B row, H query head, K key/value head, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rill.models.decode.attention_paged import LayerCache
from rill.models.decode.decode_work import GROUP_ROWS, MAX_PIECES, TILE, WORDS, DecodeWork
from rill.models.eager import ScoreRule
from rill.models.ops.triton_fp8 import as_read, widened_pairs
from rill.models.ops.triton_language import await_inputs, early_launch, power_of_2, precision, tl, triton


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    part_ptr, stat_ptr, out_ptr, row, kv, num_pieces, H: tl.constexpr, G: tl.constexpr, GJ: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, MAX_PIECES: tl.constexpr,
):  # fmt: skip
    """One row's pieces become its output. Reads past the first-level cache, which others' writes do not reach."""
    g = tl.arange(0, GJ)
    d = tl.arange(0, DP)
    n = tl.arange(0, MAX_PIECES)
    base = (row * H + kv * G + g) * MAX_PIECES
    there = (g < G)[:, None] & (n < num_pieces)[None, :]
    at_stat = (base[:, None] + n[None, :]) * 2
    tops = tl.load(stat_ptr + at_stat, mask=there, other=-1e30, cache_modifier=".cg")
    sums = tl.load(stat_ptr + at_stat + 1, mask=there, other=0.0, cache_modifier=".cg")
    best = tl.max(tops, axis=1)
    total = tl.sum(sums * tl.exp(tops - best[:, None]), axis=1)
    acc = tl.zeros([GJ, DP], tl.float32)
    for first in range(0, num_pieces, 8):
        for step in tl.static_range(8):  # eight loads under way at a time
            piece = first + step
            mine = (g < G) & (piece + 0 * g < num_pieces)
            its_top = tl.load(stat_ptr + (base + piece) * 2, mask=mine, other=-1e30, cache_modifier=".cg")
            its_part = tl.load(
                part_ptr + (base + piece)[:, None] * DP + d[None, :],
                mask=mine[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.exp(its_top - best)[:, None] * its_part
    acc = acc / tl.where(g < G, total, 1.0)[:, None]
    tl.store(
        out_ptr + (kv * G + g)[:, None] * D + d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(g < G)[:, None] & (d < D)[None, :],
    )


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q, keys_ptr, values_ptr, table, kv, begin, end, first, last, top, total, scale, cap, K, D: tl.constexpr,
    DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries over tokens [begin, end): (Σ of values, largest score, Σ of weights). They see tokens first … last, which
    are numbers, or [M, 1] of each query's own.

    WIDEN == 2: numbers of 8 bits are read two at a time, as 16 bits, which the way to the tensor cores can turn; the
    even and the odd ones are multiplied apart and put together at the end.
    """
    PER: tl.constexpr = 2 if WIDEN == 2 else 1
    d = tl.arange(0, DP // PER)
    acc = tl.zeros([q.shape[0], DP // PER], tl.float32)
    if WIDEN == 2:
        odd_acc = tl.zeros([q.shape[0], DP // PER], tl.float32)
        even_q, odd_q = tl.split(tl.reshape(q, (q.shape[0], DP // 2, 2)))
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


@triton.jit
def _store_part(part_ptr, stat_ptr, at, acc, top, total, is_mine, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(part_ptr + at[:, None] * DP + tl.arange(0, DP)[None, :], acc, mask=is_mine[:, None])
    tl.store(stat_ptr + at * 2, top, mask=is_mine)
    tl.store(stat_ptr + at * 2 + 1, total, mask=is_mine)


@triton.jit(do_not_specialize=["first_entry", "first_row"])
def _decode(  # type: ignore[no-untyped-def]
    q_ptr, q_stride, keys_ptr, values_ptr, tables_ptr, table_stride, work_ptr, first_entry, first_row, members_ptr,
    out_ptr, part_ptr, stat_ptr, count_ptr, sinks_ptr, scale, window, cap,
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
    num_own = tl.load(entry + 2)
    num_pieces = num_own + tl.load(entry + 7)
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
        if ROWS > 1:
            _store_part(part_ptr, stat_ptr, at, acc, top, total, is_mine, DP)
        elif num_pieces == 1:
            to = out_ptr + (row * H + head)[:, None] * D + d[None, :]
            tl.store(to, (acc / total[:, None]).to(q.dtype), mask=inside)
        else:
            _store_part(part_ptr, stat_ptr, at, acc, top, total, is_mine, DP)
            tl.debug_barrier()  # every thread's part is written before this program is counted
            counter = count_ptr + (seq - first_row) * K + kv
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_own - 1:
                tl.store(counter, 0)  # ready for the next layer
                out_row = out_ptr + row * H * D
                _join(
                    part_ptr, stat_ptr, out_row, seq - first_row, kv, num_pieces, H, G, GJ, D, DP, MAX_PIECES
                )


class DecodeAttention:
    """Buffers for the pieces of up to max_rows rows, made once so that graphs can refer to them."""

    num_warps = 4
    num_stages = {0: 3, 1: 3, 2: 5}
    """By how numbers are read (as_read); found by trying, on an H200."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, max_rows: int, device: torch.device
    ) -> None:
        self._heads, self._kv_heads = num_heads, num_kv_heads
        self._dim, self.dim_padded = head_dim, max(16, power_of_2(head_dim))
        parts = max_rows * num_heads * MAX_PIECES
        self._part = torch.empty(parts * self.dim_padded, dtype=torch.float32, device=device)
        self._stat = torch.empty(parts * 2, dtype=torch.float32, device=device)
        self._count = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)

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

        def launch(entries: Tensor, run: tuple[int, int, int], **rows: int) -> None:
            first_row, first_entry, num_entries = run
            _decode[(num_entries * self._kv_heads,)](
                query_BW, query_BW.shape[1], keys, values, tables, tables.stride(0), entries, first_entry, first_row,
                work.members, out, self._part, self._stat, self._count, sinks_H, scale, window, softcap,
                H=self._heads, K=self._kv_heads, D=self._dim, DP=self.dim_padded, GJ=joined, BLOCK_SIZE=block_size,
                TILE=TILE, MAX_PIECES=MAX_PIECES, WORDS=WORDS, HAS_WINDOW=window > 0, HAS_CAP=softcap > 0,
                HAS_SINKS=sinks_H is not None, WIDEN=widen, PRECISION=precision(query_BW.dtype),
                num_stages=self.num_stages[widen] if query_BW.dtype.itemsize == 2 else 2,
                **rows, **early_launch(query_BW.device),
            )  # fmt: skip

        if work.shared is not None:
            assert window == 0, "rows with a window share nothing"
            whole = (0, 0, len(work.shared))
            launch(work.shared, whole, ROWS=GROUP_ROWS, M=GROUP_ROWS * joined, num_warps=8)
        for run in work.runs:
            launch(work.entries, run, ROWS=1, M=max(16, power_of_2(group)), num_warps=self.num_warps)
