"""Log-probabilities of tokens from logits on CUDA, in two reductions whose order does not depend on the batch.

    chunks   the vocabulary is cut into chunks; each reduces to (max, Σexp) and, of rows that are sampled, Σexp above
             a cut and, where that is greedy, argmax
    row      the chunks of a row become its largest logit and its normaliser

rill.inference.native.triton_sampler reports a sampled token's log-probability from these, and `token_logprobs` gives a
known token's from the same functions: an engine's samples, its scores and a trainer's recomputation agree in every bit
where their logits do.

Axes: S row, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rill.models.ops.triton_language import await_inputs, early_launch, power_of_2, tl, triton

CHUNK = 2048
NO_CUT = tl.constexpr(-1e30)
"""Where every token stays."""
ROW_WARPS = 8
"""Of any kernel that reduces a row's chunks: how a sum is shared among threads decides its rounding."""


@triton.jit
def _chunks(  # type: ignore[no-untyped-def]
    logits_ptr, inv_t_ptr, greedy_ptr, cut_ptr, stats_ptr, argmax_ptr, vocab, num_chunks, SAMPLES: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    await_inputs(PDL)
    x = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = x * tl.load(inv_t_ptr + row)
    top = tl.max(x, axis=0)
    top = tl.where(top == float("-inf"), -1e30, top)
    weight = tl.exp(x - top)
    out = row * num_chunks + chunk
    total = tl.sum(weight, axis=0)
    tl.store(stats_ptr + out * 3, top)
    tl.store(stats_ptr + out * 3 + 1, total)
    if SAMPLES:
        cut = tl.load(cut_ptr + row)
        if cut > NO_CUT:
            total = tl.sum(tl.where(x >= cut, weight, 0.0), axis=0)
        tl.store(stats_ptr + out * 3 + 2, total)
        if tl.load(greedy_ptr + row) != 0:
            tl.store(argmax_ptr + out, chunk * CHUNK + tl.argmax(x, axis=0))


@triton.jit
def row_stats(stats_ptr, row, num_chunks, CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(each chunk's largest, the row's largest, the row's Σexp below it)."""
    c = tl.arange(0, CHUNKS)
    base = stats_ptr + (row * num_chunks + c) * 3
    tops = tl.load(base, mask=c < num_chunks, other=-1e30)
    sums = tl.load(base + 1, mask=c < num_chunks, other=0.0)
    top = tl.max(tops, axis=0)
    return tops, top, tl.sum(sums * tl.exp(tops - top), axis=0)


@triton.jit
def logprob_of(logits_ptr, row, vocab, token, inv_t, top, total):  # type: ignore[no-untyped-def]
    x = tl.load(logits_ptr + row * vocab + token).to(tl.float32) * inv_t
    return x - top - tl.log(total)


@triton.jit
def _known(  # type: ignore[no-untyped-def]
    logits_ptr, inv_t_ptr, target_ptr, stats_ptr, out_ptr, vocab, num_chunks, CHUNKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _, top, total = row_stats(stats_ptr, row, num_chunks, CHUNKS)
    token, inv_t = tl.load(target_ptr + row), tl.load(inv_t_ptr + row)
    tl.store(out_ptr + row, logprob_of(logits_ptr, row, vocab, token, inv_t, top, total))


class ChunkStats:
    """Buffers for the chunks of up to max_rows rows, made once so that graphs can refer to them."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.num_chunks = -(-vocab // CHUNK)
        self.num_chunks_padded = power_of_2(self.num_chunks)
        self.values = torch.empty(max_rows * self.num_chunks * 3, dtype=torch.float32, device=device)
        self.argmax = torch.empty(max_rows * self.num_chunks, dtype=torch.int32, device=device)

    def fill(
        self, logits_SV: Tensor, inv_temperature_S: Tensor, sampled: tuple[Tensor, Tensor] | None
    ) -> None:
        """`sampled`: which rows are greedy, and above what tokens stay in each."""
        rows, vocab = logits_SV.shape
        is_greedy_S, cut_S = sampled or (None, None)
        _chunks[(rows, self.num_chunks)](
            logits_SV, inv_temperature_S, is_greedy_S, cut_S, self.values, self.argmax, vocab, self.num_chunks,
            SAMPLES=sampled is not None, CHUNK=CHUNK, num_warps=4, **early_launch(logits_SV.device),
        )  # fmt: skip


def token_logprobs(logits_SV: Tensor, targets_S: Tensor, inv_temperature_S: Tensor) -> Tensor:
    """log softmax(logits · 1/temperature) at each row's target: float32, the sampler's bits."""
    rows, vocab = logits_SV.shape
    out_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    if rows:
        logits_SV = logits_SV.contiguous()
        stats = ChunkStats(rows, vocab, logits_SV.device)
        stats.fill(logits_SV, inv_temperature_S, None)
        _known[(rows,)](
            logits_SV, inv_temperature_S, targets_S, stats.values, out_S, vocab, stats.num_chunks,
            CHUNKS=stats.num_chunks_padded, num_warps=ROW_WARPS,
        )  # fmt: skip
    return out_S
