"""The tensors an algorithm sees, and how its parts combine into one loss.

Everything is flat: the tokens of all sequences of a micro-batch one after another, as packing lays them out.
Functions are pure; nothing here knows of processes, models or files.

N trained or untrained token of the micro-batch, S sequence of the micro-batch.

Every loss is a sum of per-token terms times `weights_N`, which an aggregation mode computes from the mask, so
that the caller can add micro-batches and ranks and divide once by the global denominator:

    gradient = ( Σ over micro-batches and ranks of  ∇ Σ_N weights_N · loss_N ) / ( Σ of denominators )

The same batch therefore gives the same gradient however it is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the data-parallel ranks and gives every rank the same result."""


def one_rank(values: Tensor) -> Tensor:
    """The Reduce of a run with one data-parallel rank."""
    return values


class Need(StrEnum):
    """What an algorithm needs computed before its loss; see Algorithm.needs."""

    OLD_LOGPROBS = "old_logprobs"  # a pass before the first step, where a batch has several optimizer steps
    REWARD_LOGPROBS = "reward_logprobs"  # log π_old in AdvantageBatch: the KL penalty is in the reward
    REF_LOGPROBS = "ref_logprobs"
    VALUES = "values"
    TEACHER_LOGPROBS = "teacher_logprobs"
    ENERGIES = "energies"  # the squared gradient of log π_old in the logits, for each token
    GREEDY_BASELINE = "greedy_baseline"  # the reward of one greedy answer to each prompt
    ENTROPY = "entropy"
    FULL_VOCABULARY_TEACHER = "full_vocabulary_teacher"  # the teacher's last hidden states and head
    LAG = "lag"  # policy versions between sampling and training, for each token
    STATISTICS = "statistics"  # figures over the whole batch, from Algorithm.statistics


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """One micro-batch. Sequences are never split across micro-batches."""

    logprobs_N: Tensor
    """log π of the current policy; it carries a gradient, as entropy_N, teacher_kl_N and values_N do."""
    mask_N: Tensor
    """1.0 on trained tokens, else 0.0."""
    seq_N: Tensor
    """int64: which sequence of this micro-batch a token belongs to, 0 ≤ seq < num_seqs."""
    num_seqs: int
    advantages_N: Tensor
    old_logprobs_N: Tensor
    """log π_old; equal to logprobs_N.detach() when there is one optimizer step per batch."""
    knows_old: bool = True
    """False: old_logprobs_N only repeats the current policy, which has moved since the batch began; no mismatch is
    measured from it."""
    rollout_logprobs_N: Tensor
    """log μ as the engine reported it. For corrections and mismatch metrics only."""
    ref_logprobs_N: Tensor | None = None
    teacher_logprobs_N: Tensor | None = None
    teacher_kl_N: Tensor | None = None
    """The divergence from the teachers over the whole vocabulary, from distill.full_vocabulary_kl."""
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None
    lag_N: Tensor | None = None
    """The version that the step starts from less the version that sampled the token; 0 is on-policy."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """Figures over the whole batch, from Algorithm.statistics. Empty: the micro-batch stands for the batch."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure that adds up over micro-batches and ranks: a mean is total / weight, an extreme is a max."""

    total: Tensor
    weight: Tensor
    is_max: bool = False

    @staticmethod
    def mean(values_N: Tensor, weights_N: Tensor) -> Metric:
        return Metric(total=(values_N * weights_N).sum().detach(), weight=weights_N.sum().detach())

    @staticmethod
    def largest(values: Tensor) -> Metric:
        largest = values.max() if values.numel() else values.new_full((), float("-inf"))
        return Metric(total=largest.detach(), weight=torch.ones_like(largest), is_max=True)

    def with_(self, other: Metric) -> Metric:
        """Of both micro-batches."""
        if self.is_max:
            return replace(self, total=torch.maximum(self.total, other.total))
        return Metric(total=self.total + other.total, weight=self.weight + other.weight)

    def emptied(self) -> Metric:
        """Of no token."""
        return replace(
            self,
            total=torch.full_like(self.total, float("-inf") if self.is_max else 0.0),
            weight=torch.zeros_like(self.weight),
        )


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """What a policy or value loss returns: one term per token, before weights and aggregation."""

    loss_N: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """A micro-batch's share of the loss: backward() `numerator`, divide the gradient by divisor(Σ denominator).

    A mode that is a plain sum has denominator 0 in every micro-batch.
    """

    numerator: Tensor
    denominator: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


def divisor(total_denominator: Tensor) -> Tensor:
    """What the summed gradient is divided by: the summed denominator, or 1 for a mode that is a plain sum."""
    return torch.where(total_denominator > 0, total_denominator, torch.ones_like(total_denominator))


class LossPart:
    """What a policy loss and a correction have in common."""

    needs: frozenset[Need] = frozenset({Need.OLD_LOGPROBS})

    uses_rollout_ratio: bool = False
    """True where it holds π/μ: a loss and a correction that both do would count the mismatch twice."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        """Figures over the whole batch, for TokenBatch.statistics; none for most."""
        return {}

    def figures(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """Those that the micro-batch was given, or its own where it was given none."""
        return batch.statistics or self.statistics([batch], one_rank)
