"""Sampling on CUDA in two or three passes over the logits, without a sort and without a host sync.

    cut    (only with top-k, top-p or min-p) bisects each row's threshold to its exact value
    chunks each chunk of the vocabulary reduces to a few numbers (rill.models.ops.triton_logprob)
    pick   per row: normaliser, the chunk that holds the row's uniform number, the token inside it

The meaning is that of rill.inference.native.sampler.sample; every row depends on its own logits alone.
"""

from __future__ import annotations

import torch

from rill.models.ops.triton_language import tl, triton
from rill.models.ops.triton_logprob import CHUNK, ROW_WARPS, ChunkStats, logprob_of, row_stats


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """float32 -> int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    logits_ptr, inv_t_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cut_ptr, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocab
    inv_t = tl.load(inv_t_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, vocab, BLOCK):
        best = tl.maximum(
            best, tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
        )
    top = tl.max(best, axis=0) * inv_t
    cut = -1e30
    # The largest threshold with at least k entries at or above it.
    if (top_k > 0) & (top_k < vocab):
        lo = _ordered(top - 1e4).to(tl.int64)
        hi = _ordered(top).to(tl.int64)
        while lo < hi:
            mid = (lo + hi + 1) // 2
            count = tl.zeros([BLOCK], tl.int32)
            for at in range(0, vocab, BLOCK):
                x = (
                    tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
                    * inv_t
                )
                count += ((_ordered(x).to(tl.int64) >= mid) & (at + lane < vocab)).to(tl.int32)
            if tl.sum(count, axis=0) >= top_k:
                lo = mid
            else:
                hi = mid - 1
        key = lo.to(tl.int32)
        cut = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    # The largest threshold whose mass is at least p of what top-k kept.
    if top_p < 1.0:
        kept = tl.zeros([BLOCK], tl.float32)
        for at in range(0, vocab, BLOCK):
            x = tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32) * inv_t
            kept += tl.where((x >= cut) & (at + lane < vocab), tl.exp(x - top), 0.0)
        want = tl.sum(kept, axis=0) * top_p
        lo = _ordered(tl.maximum(cut, top - 1e4)).to(tl.int64)
        hi = _ordered(top).to(tl.int64)
        while lo < hi:
            mid = (lo + hi + 1) // 2
            mass = tl.zeros([BLOCK], tl.float32)
            for at in range(0, vocab, BLOCK):
                x = (
                    tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
                    * inv_t
                )
                mass += tl.where(
                    (_ordered(x).to(tl.int64) >= mid) & (at + lane < vocab), tl.exp(x - top), 0.0
                )
            if tl.sum(mass, axis=0) >= want:
                lo = mid
            else:
                hi = mid - 1
        key = lo.to(tl.int32)
        cut = tl.maximum(cut, tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True))
    if min_p > 0.0:
        cut = tl.maximum(cut, top + tl.log(min_p))
    tl.store(cut_ptr + row, cut)


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits_ptr, inv_t_ptr, greedy_ptr, uniform_ptr, cut_ptr, stats_ptr, argmax_ptr, token_ptr, logprob_ptr, last_ptr,
    slot_ptr, vocab, num_chunks, HAS_CUT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    real = c < num_chunks
    tops, top, total = row_stats(stats_ptr, row, num_chunks, CHUNKS)
    kept = tl.load(stats_ptr + (row * num_chunks + c) * 3 + 2, mask=real, other=0.0)
    inv_t = tl.load(inv_t_ptr + row)
    if tl.load(greedy_ptr + row) != 0:
        best = tl.min(tl.where(real & (tops == top), c, CHUNKS), axis=0)
        # Where no logit is a number no chunk is the best: any token will do, inside the vocabulary; its score is NaN.
        token = tl.load(argmax_ptr + row * num_chunks + tl.minimum(best, num_chunks - 1))
        token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    else:
        mass = kept * tl.exp(tops - top)
        ends = tl.cumsum(mass, axis=0)
        target = tl.load(uniform_ptr + row) * tl.sum(mass, axis=0)
        # The first chunk that ends above the target and has mass; rounding at the very end falls back to the last.
        last = tl.max(tl.where(mass > 0.0, c, 0), axis=0)
        chunk = tl.minimum(tl.min(tl.where((ends > target) & (mass > 0.0), c, CHUNKS), axis=0), last)
        before = tl.sum(tl.where(c < chunk, mass, 0.0), axis=0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = (
            tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            * inv_t
        )
        weight = tl.exp(x - top)
        if HAS_CUT:
            weight = tl.where(x >= tl.load(cut_ptr + row), weight, 0.0)
        inner = tl.cumsum(weight, axis=0) + before
        final = tl.max(tl.where(weight > 0.0, at, 0), axis=0)
        token = tl.minimum(tl.min(tl.where((inner > target) & (weight > 0.0), at, vocab), axis=0), final)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, logprob_of(logits_ptr, row, vocab, token, inv_t, top, total))
    tl.store(last_ptr + tl.load(slot_ptr + row), token)


class TritonSampler:
    """Buffers for up to max_rows rows, made once so that graphs can refer to them."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._stats = ChunkStats(max_rows, vocab, device)
        self._cut = torch.empty(max_rows, dtype=torch.float32, device=device)

    def __call__(
        self,
        logits_SV: torch.Tensor,
        inv_temperature_S: torch.Tensor,
        is_greedy_S: torch.Tensor,
        uniform_S: torch.Tensor,
        slots_S: torch.Tensor,
        last_tokens: torch.Tensor,
        tokens_S: torch.Tensor,
        logprobs_S: torch.Tensor,
        filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Writes tokens_S and logprobs_S, and last_tokens at each row's slot. filters: top_k, top_p, min_p."""
        rows, vocab = logits_SV.shape
        cut_S = None
        if filters is not None:
            cut_S = self._cut
            _cut[(rows,)](logits_SV, inv_temperature_S, *filters, cut_S, vocab, BLOCK=8192, num_warps=16)
        stats = self._stats
        stats.fill(logits_SV, inv_temperature_S, cut_S)
        _pick[(rows,)](
            logits_SV, inv_temperature_S, is_greedy_S, uniform_S, cut_S, stats.values, stats.argmax, tokens_S,
            logprobs_S, last_tokens, slots_S, vocab, stats.num_chunks, HAS_CUT=cut_S is not None, CHUNK=CHUNK,
            CHUNKS=stats.num_chunks_padded, num_warps=ROW_WARPS,
        )  # fmt: skip
