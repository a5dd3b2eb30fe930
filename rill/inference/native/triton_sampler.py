"""Sampling on CUDA in two passes over the logits, without a sort and without a host sync.

    cut    of rows with top-k, min-p or a low top-p: narrows the threshold down to its exact value, five guesses a
           pass: most often five passes find it
    chunks each chunk of the vocabulary reduces to a few numbers (rill.models.ops.triton_logprob)
    pick   per row: normaliser, the chunk that holds the row's uniform number, the token inside it; with top-p alone a
           pass that sums what is likelier than it, and another draw where that is too much

The meaning is that of rill.inference.native.sampler.sample; every row depends on its own logits alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rill.inference.native.sampler import MAX_DRAWS
from rill.models.ops.triton_language import await_inputs, early_launch, tl, triton
from rill.models.ops.triton_logprob import CHUNK, NO_CUT, ROW_WARPS, ChunkStats, logprob_of, row_stats


@triton.jit
def _key(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> integer of the same order; SHIFT: the lowest bits, which the logits' dtype leaves 0, dropped."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest float32 of that key."""
    bits = key.to(tl.int32) << SHIFT
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _guess(lo, hi, part, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The key so many sixths of the way from lo to hi: by value where they lie far apart, for most of the keys between
    them are those of tiny numbers."""
    low, high = _value(lo, SHIFT), _value(hi, SHIFT)
    by_value = _key(low + (high - low) * (part / 6), SHIFT).to(tl.int64)
    by_key = lo + ((hi - lo) * part + 5) // 6
    guess = tl.where((hi - lo) >> (16 - SHIFT) > 1024, by_value, by_key)
    return tl.minimum(tl.maximum(guess, lo + 1), hi)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    base, vocab, top, inv_t, lo, hi, want, IS_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest key of [lo, hi] at or above which lie at least `want` entries, or so much mass; lo must."""
    lane = tl.arange(0, BLOCK)
    while lo < hi:
        m1, m2, m3 = _guess(lo, hi, 1, SHIFT), _guess(lo, hi, 2, SHIFT), _guess(lo, hi, 3, SHIFT)
        m4, m5 = _guess(lo, hi, 4, SHIFT), _guess(lo, hi, 5, SHIFT)
        v1, v2, v3 = _value(m1, SHIFT), _value(m2, SHIFT), _value(m3, SHIFT)
        v4, v5 = _value(m4, SHIFT), _value(m5, SHIFT)
        nothing = tl.zeros([BLOCK], tl.float32)
        s1, s2, s3, s4, s5 = nothing, nothing, nothing, nothing, nothing
        for at in range(0, vocab, BLOCK):
            raw = tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
            if IS_MASS:
                weight = tl.exp(raw * inv_t - top)
            else:
                weight = nothing + 1.0  # float32 counts to 16 million exactly
            s1 += tl.where(raw >= v1, weight, 0.0)
            s2 += tl.where(raw >= v2, weight, 0.0)
            s3 += tl.where(raw >= v3, weight, 0.0)
            s4 += tl.where(raw >= v4, weight, 0.0)
            s5 += tl.where(raw >= v5, weight, 0.0)
        # Each guess that holds raises lo to it, the first that does not lowers hi below it.
        is1, is2, is3 = tl.sum(s1, axis=0) >= want, tl.sum(s2, axis=0) >= want, tl.sum(s3, axis=0) >= want
        is4, is5 = tl.sum(s4, axis=0) >= want, tl.sum(s5, axis=0) >= want
        below = tl.where(is4, m5, tl.where(is3, m4, tl.where(is2, m3, tl.where(is1, m2, m1)))) - 1
        hi = tl.where(is5, hi, below)
        above = tl.where(is3, m3, tl.where(is2, m2, tl.where(is1, m1, lo)))
        lo = tl.where(is5, m5, tl.where(is4, m4, above))
    return lo


@triton.jit
def _is_redrawn(top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """As SamplingBatch.is_redrawn_S."""
    return (top_k <= 0) & (min_p <= 0.0) & (top_p < 1.0) & (top_p >= 0.5)


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    logits_ptr, inv_t_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cut_ptr, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocab
    inv_t = tl.load(inv_t_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    await_inputs(PDL)
    is_whole = (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)
    if is_whole | _is_redrawn(top_k, top_p, min_p):
        tl.store(cut_ptr + row, NO_CUT)
        return
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocab, BLOCK):
        raw = tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(best, raw)
        sums = sums * tl.exp((best - higher) * inv_t) + tl.exp((raw - higher) * inv_t)
        best = higher
    top_raw = tl.max(best, axis=0)
    total = tl.sum(sums * tl.exp((best - top_raw) * inv_t), axis=0)
    top = top_raw * inv_t
    cut = -1e30
    hi = _key(top_raw, SHIFT).to(tl.int64)
    lo = _key(top_raw - 1e4 / inv_t, SHIFT).to(tl.int64)
    if (top_k > 0) & (top_k < vocab):
        lo = _narrow(base, vocab, top, inv_t, lo, hi, top_k.to(tl.float32), False, SHIFT, BLOCK)
        floor = _value(lo, SHIFT)
        cut = floor * inv_t
        if top_p < 1.0:
            kept = tl.zeros([BLOCK], tl.float32)
            for at in range(0, vocab, BLOCK):
                raw = tl.load(base + at + lane, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
                kept += tl.where(raw >= floor, tl.exp(raw * inv_t - top), 0.0)
            total = tl.sum(kept, axis=0)
    if top_p < 1.0:
        # Entries so small that all of them together would be less than what is dropped lie below the threshold.
        least = top_raw + (tl.log(total * (1.0 - top_p) / vocab) - 1.0) / inv_t
        lo = tl.maximum(lo, _key(tl.maximum(least, top_raw - 60.0 / inv_t), SHIFT).to(tl.int64))
        lo = _narrow(base, vocab, top, inv_t, lo, hi, total * top_p, True, SHIFT, BLOCK)
        cut = tl.maximum(cut, _value(lo, SHIFT) * inv_t)
    if min_p > 0.0:
        cut = tl.maximum(cut, top + tl.log(min_p))
    tl.store(cut_ptr + row, cut)


@triton.jit
def _invert(  # type: ignore[no-untyped-def]
    base, uniform, inv_t, top, cut, mass, vocab, HAS_CUT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The token at the uniform number's place; mass: of each chunk."""
    c = tl.arange(0, CHUNKS)
    ends = tl.cumsum(mass, axis=0)
    target = uniform * tl.sum(mass, axis=0)
    # The first chunk that ends above the target and has mass; rounding at the very end falls back to the last.
    last = tl.max(tl.where(mass > 0.0, c, 0), axis=0)
    chunk = tl.minimum(tl.min(tl.where((ends > target) & (mass > 0.0), c, CHUNKS), axis=0), last)
    before = tl.sum(tl.where(c < chunk, mass, 0.0), axis=0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(base + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * inv_t
    weight = tl.exp(x - top)
    if HAS_CUT:
        weight = tl.where(x >= cut, weight, 0.0)
    inner = tl.cumsum(weight, axis=0) + before
    final = tl.max(tl.where(weight > 0.0, at, 0), axis=0)
    return tl.minimum(tl.min(tl.where((inner > target) & (weight > 0.0), at, vocab), axis=0), final)


@triton.jit
def _next_draw(state):  # type: ignore[no-untyped-def]
    """As rill.inference.native.sampler.next_draw."""
    x = state + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits_ptr, inv_t_ptr, greedy_ptr, uniform_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cut_ptr, stats_ptr, argmax_ptr,
    numbers_ptr, place_ptr, width, last_ptr, slot_ptr, turn_ptr, num_turns, vocab, num_chunks,
    MAX_DRAWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocab
    c = tl.arange(0, CHUNKS)
    to = numbers_ptr + tl.load(place_ptr).to(tl.int64) * 2 * width + row
    await_inputs(PDL)
    if turn_ptr is not None:  # noqa: SIM102 Triton decides the first when it compiles
        if row == 0:  # who reads it has ended
            tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % num_turns)
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
        uniform, cut, top_p = tl.load(uniform_ptr + row), tl.load(cut_ptr + row), tl.load(top_p_ptr + row)
        token = _invert(base, uniform, inv_t, top, cut, mass, vocab, True, CHUNK, CHUNKS)
        if _is_redrawn(tl.load(top_k_ptr + row), top_p, tl.load(min_p_ptr + row)):
            state = uniform.to(tl.uint32, bitcast=True)
            drawn = tl.load(base + token).to(tl.float32)
            is_out, num_draws, lane = drawn == drawn, 1, tl.arange(0, 2 * CHUNK)
            while is_out & (num_draws < MAX_DRAWS):
                sums = tl.zeros([2 * CHUNK], tl.float32)
                for at in range(0, vocab, 2 * CHUNK):
                    here = base + at + lane
                    raw = tl.load(here, mask=at + lane < vocab, other=float("-inf")).to(tl.float32)
                    sums += tl.where(raw > drawn, tl.exp(raw * inv_t - top), 0.0)
                # A token is kept while what comes before is less.
                is_out = tl.sum(sums, axis=0) >= top_p * total
                if is_out:
                    state = _next_draw(state)
                    uniform = (state >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
                    token = _invert(base, uniform, inv_t, top, cut, mass, vocab, False, CHUNK, CHUNKS)
                    drawn = tl.load(base + token).to(tl.float32)
                num_draws += 1
    logprob = logprob_of(logits_ptr, row, vocab, token, inv_t, top, total)
    tl.store(to, token)
    tl.store(to + width, logprob.to(tl.int32, bitcast=True))
    tl.store(last_ptr + tl.load(slot_ptr + row), token)


_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""The lowest bits of a float32 that hold nothing of such a number. float16's subnormals have fewer; they are not lost:
their key is that of the next lower number, and ties at the cut are kept."""


class TritonSampler:
    """Buffers for up to max_rows rows, made once so that graphs can refer to them."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._stats = ChunkStats(max_rows, vocab, device)
        self._cut = torch.empty(max_rows, dtype=torch.float32, device=device)

    def __call__(
        self,
        logits_SV: torch.Tensor,
        columns: Sequence[torch.Tensor],
        last_tokens: torch.Tensor,
        numbers: torch.Tensor,
        place: torch.Tensor,
        turn: tuple[torch.Tensor, int] | None = None,
    ) -> None:
        """Writes tokens and the bits of their log-probabilities to numbers [places, 2, rows], which may lie in the
        host's memory, and last_tokens at each row's slot. columns, of 32 bits each: slots, 1/temperature, whether
        greedy, uniform numbers, top-k, top-p, min-p; place: where in `numbers`; turn: a number on the device that goes
        on by one, up to a limit and again from 0."""
        rows, vocab = logits_SV.shape
        slots_S, inverse, is_greedy_S, uniform, top_k_S, top_p, min_p = columns
        inverse_S, uniform_S, top_p_S, min_p_S = (
            column.view(torch.float32) for column in (inverse, uniform, top_p, min_p)
        )
        stats, cut_S, early = self._stats, self._cut, early_launch(logits_SV.device)
        _cut[(rows,)](
            logits_SV, inverse_S, top_k_S, top_p_S, min_p_S, cut_S, vocab, SHIFT=_SPARE_BITS[logits_SV.dtype],
            BLOCK=8192, num_warps=16, **early,
        )  # fmt: skip
        stats.fill(logits_SV, inverse_S, (is_greedy_S, cut_S))
        _pick[(rows,)](
            logits_SV, inverse_S, is_greedy_S, uniform_S, top_k_S, top_p_S, min_p_S, cut_S, stats.values, stats.argmax,
            numbers, place, numbers.shape[-1], last_tokens, slots_S, *(turn or (None, 0)), vocab, stats.num_chunks,
            MAX_DRAWS=MAX_DRAWS, CHUNK=CHUNK, CHUNKS=stats.num_chunks_padded, num_warps=ROW_WARPS, **early,
        )  # fmt: skip
