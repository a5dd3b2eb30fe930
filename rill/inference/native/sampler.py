"""From logits to tokens: one uniform number per (seed, position), inverted through the filtered distribution.

The number depends on nothing else, so a request's tokens do not depend on its batch. Where top-p alone filters and
leaves half of the mass or more, the number is inverted through the whole distribution instead, and a token outside is
drawn again from a number made of the last one: the same distribution, without a search for the filter's threshold.
The order of operations:

    logits ─ repetition ─ presence, frequency ─ bias, forbidden ids ─ / temperature ─► reported distribution
           ─ grammar ─ top-k ─ top-p ─ min-p (ties at the cut are all kept) ─► sampled distribution

temperature 0 takes the largest logit and reports the temperature-1 distribution. The torch functions here run on
every device, and each computes a row by itself: its bits do not depend on the batch. For CUDA
rill.inference.native.triton_sampler holds faster ones with the same results. What changes single logits of a row is
made by logit_edits.py.

Axes: S sampled row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rill.inference.native.logit_edits import LogitEdits, apply_edits, apply_masks

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

MIN_REDRAWN_P = 0.5
"""Of top-p: with less, drawing again would take too long."""
MAX_DRAWS = 64
"""By then one in 2 ** 64 would have found no token."""


def uniforms(seeds_S: npt.NDArray[np.uint64], positions_S: Longs) -> Doubles:
    """One number in [0, 1) per (seed, position): splitmix64 of the pair, top 53 bits."""
    with np.errstate(over="ignore"):
        x = seeds_S + positions_S.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):  # one round leaves neighbouring seeds at one position correlated
            x = x + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def next_draw(state_S: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The state after it, whose top 24 bits are the next number; the first is a number's bits in single precision."""
    with np.errstate(over="ignore"):
        x = state_S + np.uint32(0x9E3779B9)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))


def hash_seed(seed: int, counter: int = 0) -> int:
    """A 64-bit stream number from a user's seed, or from the engine's seed and a request counter."""
    most = 2**64 - 1
    x = seed * 0xD1342543DE82EF95 + counter * (0x2545F4914F6CDD1D + 0x9E3779B97F4A7C15) + 1
    for _ in range(2):  # splitmix64, as in uniforms(); NumPy takes ten times as long for a single number
        x = (x + 0x9E3779B97F4A7C15) & most
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & most
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & most
        x ^= x >> 31
    return x >> 11


@dataclass(slots=True)
class SamplingBatch:
    temperature_S: npt.NDArray[np.float32]
    top_k_S: npt.NDArray[np.int32]
    top_p_S: npt.NDArray[np.float32]
    min_p_S: npt.NDArray[np.float32]
    uniform_S: Doubles
    edits: LogitEdits | None = None
    num_top: int = 0
    """How many of the likeliest tokens are reported beside the sampled one."""

    def rows(self, rows: slice | Longs, edits: LogitEdits | None = None) -> SamplingBatch:
        """Parameters of some of them, with edits of their own."""
        return SamplingBatch(
            temperature_S=self.temperature_S[rows],
            top_k_S=self.top_k_S[rows],
            top_p_S=self.top_p_S[rows],
            min_p_S=self.min_p_S[rows],
            uniform_S=self.uniform_S[rows],
            edits=edits,
        )

    @property
    def is_filtered(self) -> bool:
        return bool((self.top_k_S > 0).any() or (self.top_p_S < 1).any() or (self.min_p_S > 0).any())

    @property
    def is_redrawn_S(self) -> npt.NDArray[np.bool_]:
        """Rows whose token is drawn from the whole distribution until it is one that the filter keeps."""
        is_alone = (self.top_k_S <= 0) & (self.min_p_S <= 0)
        return is_alone & (self.top_p_S < 1) & (self.top_p_S >= MIN_REDRAWN_P)


def sample(logits_SV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and log-probability of each row. `logits_SV` is fp32 and is overwritten."""
    device = logits_SV.device
    if batch.edits:
        apply_edits(logits_SV, batch.edits)
    temperature_S = torch.from_numpy(batch.temperature_S).to(device)
    is_greedy_S = temperature_S == 0
    logits_SV /= torch.where(is_greedy_S, 1.0, temperature_S)[:, None]
    reported_SV = logits_SV.log_softmax(-1)
    allowed_SV = apply_masks(logits_SV, batch.edits) if batch.edits and batch.edits.masks else logits_SV
    if bool((batch.temperature_S == 0).all()):
        tokens_S = allowed_SV.argmax(dim=-1)
    else:
        tokens_S = torch.where(is_greedy_S, allowed_SV.argmax(dim=-1), _draw(allowed_SV, batch))
    return tokens_S, reported_SV.gather(1, tokens_S[:, None])[:, 0]


def _draw(logits_SV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """A token of each row from the filtered distribution."""
    if not batch.is_filtered:
        return _invert(logits_SV.softmax(-1).double().cumsum(dim=-1), batch.uniform_S)
    kept_SV = filter_logits(logits_SV, batch)
    is_redrawn_S = batch.is_redrawn_S
    drawn_SV = torch.where(torch.from_numpy(is_redrawn_S).to(logits_SV.device)[:, None], logits_SV, kept_SV)
    cumulative_SV = drawn_SV.softmax(-1).double().cumsum(dim=-1)
    state_S = batch.uniform_S.astype(np.float32).view(np.uint32)
    tokens_S = _invert(cumulative_SV, batch.uniform_S)
    for _ in range(1, MAX_DRAWS):
        is_out_S = (kept_SV.gather(1, tokens_S[:, None])[:, 0] == float("-inf")).cpu().numpy() & is_redrawn_S
        rows = np.flatnonzero(is_out_S)
        if not len(rows):
            break
        state_S[rows] = next_draw(state_S[rows])
        tokens_S[rows] = _invert(
            cumulative_SV[rows], (state_S[rows] >> np.uint32(8)).astype(np.float64) * 2.0**-24
        )
    return tokens_S


def _invert(cumulative_SV: torch.Tensor, uniform_S: Doubles) -> torch.Tensor:
    target_S1 = cumulative_SV[:, -1:] * torch.from_numpy(uniform_S).to(cumulative_SV.device)[:, None]
    # side="right" finds the first entry above the target, so a token of probability 0 is never chosen.
    tokens_S = torch.searchsorted(cumulative_SV, target_S1, side="right")[:, 0]
    # NaN has no first entry; its log-probability is NaN too.
    return tokens_S.clamp_(max=cumulative_SV.shape[1] - 1)


def resample_masked(
    logits_SV: torch.Tensor, batch: SamplingBatch, tokens_S: torch.Tensor, logprobs_S: torch.Tensor
) -> torch.Tensor | None:
    """After a kernel that knows no masks: put the rows that have one right, and say which. `logits_SV` are edited."""
    if batch.edits is None or not batch.edits.masks:
        return None
    rows_S = np.array([row for row, _ in batch.edits.masks], dtype=np.int64)
    masks = [(row, bits) for row, (_, bits) in enumerate(batch.edits.masks)]
    rows = torch.from_numpy(rows_S).to(logits_SV.device)
    tokens, logprobs = sample(logits_SV[rows].float(), batch.rows(rows_S, LogitEdits(masks=masks)))
    tokens_S[rows] = tokens.to(tokens_S.dtype)
    logprobs_S[rows] = logprobs
    return rows


def likeliest(logits_SV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, num_top] tokens and log-probabilities of the reported distribution, the largest first."""
    scaled_SV = logits_SV.float().clone()
    if batch.edits:
        apply_edits(scaled_SV, batch.edits)
    temperature_S = torch.from_numpy(np.where(batch.temperature_S == 0, np.float32(1), batch.temperature_S))
    scaled_SV /= temperature_S.to(logits_SV.device)[:, None]
    norm_S1 = scaled_SV.logsumexp(dim=-1, keepdim=True)
    values, tokens = scaled_SV.topk(min(batch.num_top, scaled_SV.shape[1]), dim=-1)
    return tokens, values - norm_S1


def filter_logits(logits_SV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """-inf where top-k, top-p or min-p exclude a token."""
    device, vocab = logits_SV.device, logits_SV.shape[1]
    cut_S = torch.full((len(logits_SV),), float("-inf"), device=device)
    sorted_rows = np.flatnonzero((batch.top_k_S > 0) | (batch.top_p_S < 1))
    if len(sorted_rows):
        rows = torch.from_numpy(sorted_rows).to(device)
        top_k = np.where(batch.top_k_S > 0, np.minimum(batch.top_k_S, vocab), vocab)[sorted_rows]
        values_RV = logits_SV[rows].sort(dim=-1, descending=True).values
        least_R1 = values_RV.gather(1, torch.from_numpy(top_k).long().to(device)[:, None] - 1)
        values_RV = values_RV.masked_fill(values_RV < least_R1, float("-inf"))
        probs_RV = values_RV.double().softmax(dim=-1)
        top_p = torch.from_numpy(batch.top_p_S[sorted_rows]).to(device)[:, None]
        # A token is kept while the mass before it is below p: at least one always is.
        num_kept_R = ((probs_RV.cumsum(dim=-1) - probs_RV < top_p) & (values_RV > float("-inf"))).sum(dim=-1)
        cut_S[rows] = values_RV.gather(1, (num_kept_R - 1).clamp_(min=0)[:, None])[:, 0]
    min_p_S = torch.from_numpy(batch.min_p_S).to(device)
    cut_S = torch.maximum(cut_S, logits_SV.amax(dim=-1) + min_p_S.log())
    return logits_SV.masked_fill(logits_SV < cut_S[:, None], float("-inf"))
