"""Which tokens drive the entropy down: the covariance of log-probability and advantage (arXiv 2505.22617).

    cov_t = (log π_old(t) − mean log π_old) · (A_t − mean A)        means over the trained tokens of the batch

Clip-Cov and KL-Cov restrain a small share of the tokens of largest covariance. Means, counts and the threshold
are figures of the whole batch: computed once by `statistics` over all micro-batches and ranks they make the loss
independent of the split; without them the micro-batch stands for the batch, as in the authors' code. π_old
(not π) keeps the choice fixed over the optimizer steps of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rill.algorithms.base import Reduce, TokenBatch, one_rank

MEAN_LOGPROB = "covariance/mean_logprob"
MEAN_ADVANTAGE = "covariance/mean_advantage"
NUM_TOKENS = "covariance/num_tokens"


def mean_statistics(batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
    """The two means and the number of trained tokens, over all micro-batches and ranks."""
    sums = torch.stack(
        [
            torch.stack(
                [(b.old_logprobs_N * b.mask_N).sum(), (b.advantages_N * b.mask_N).sum(), b.mask_N.sum()]
            )
            for b in batches
        ]
    ).double()
    logprob, advantage, count = reduce(sums.sum(0)).unbind()
    divide_by = count.clamp(min=1)
    return {MEAN_LOGPROB: logprob / divide_by, MEAN_ADVANTAGE: advantage / divide_by, NUM_TOKENS: count}


def token_covariance(batch: TokenBatch, statistics: Mapping[str, Tensor]) -> Tensor:
    """cov_t as above in float32, so that equal tokens compare equal whatever the batch's precision."""
    cov_N = (batch.old_logprobs_N.double() - statistics[MEAN_LOGPROB]) * (
        batch.advantages_N.double() - statistics[MEAN_ADVANTAGE]
    )
    return cov_N.float().detach()


def largest_threshold(
    covs: Sequence[Tensor], masks: Sequence[Tensor], count: Tensor, reduce: Reduce = one_rank
) -> Tensor:
    """The `count`-th largest value over all micro-batches and ranks; +inf when count is 0. Ties are all at it.

    float32 order is the order of its bits read as an integer, so halving the integers 32 times finds the value exactly,
    and a sum is all the ranks exchange.
    """
    if int(count) < 1:
        return torch.tensor(float("inf"), device=count.device)
    keys = [_ordered_bits(cov_N)[mask_N > 0] for cov_N, mask_N in zip(covs, masks, strict=True)]
    low, high = 0, 1 << 32  # the value's integer is below `high` and not below `low`
    while high - low > 1:
        middle = (low + high) // 2
        num_above = reduce(torch.stack([(key_M >= middle).sum() for key_M in keys]).sum().double())
        low, high = (middle, high) if num_above >= count else (low, middle)
    return _from_ordered_bits(low, count.device)


def _ordered_bits(values_N: Tensor) -> Tensor:
    """float32 as an integer in [0, 2³²) of the same order."""
    bits_N = values_N.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits_N >= 0, bits_N + (1 << 31), -1 - bits_N)


def _from_ordered_bits(key: int, device: torch.device) -> Tensor:
    bits = key - (1 << 31) if key >= (1 << 31) else -1 - key
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


def token_lottery(batch: TokenBatch) -> Tensor:
    """A number in [0, 1) for each token, a hash of its place among its sequence's trained tokens and its figures.

    Random enough to pick tokens by, yet the same however the batch is split or padded and in every repetition.
    """
    is_on_N = batch.mask_N > 0
    count_N = is_on_N.to(torch.int64).cumsum(0)
    unset = count_N.numel() + 1
    first_S = torch.full((batch.num_seqs,), unset, device=count_N.device)
    first_S = first_S.scatter_reduce(0, batch.seq_N, count_N.masked_fill(~is_on_N, unset), reduce="amin")
    mixed_N = (count_N - first_S[batch.seq_N]).clamp(min=0)
    for values_N in (batch.old_logprobs_N, batch.rollout_logprobs_N, batch.advantages_N):
        bits_N = values_N.detach().float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        mixed_N = _mix(mixed_N ^ bits_N)
    return mixed_N.double() / float(1 << 32)


def _mix(x_N: Tensor) -> Tensor:
    """A 32-bit integer hash: every input bit reaches every output bit."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x_N = ((x_N ^ (x_N >> shift)) * factor) & 0xFFFFFFFF
    return x_N ^ (x_N >> 15)
