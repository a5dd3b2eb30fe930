"""What a preference loss is: a sum over pairs, or over single answers, of one flat micro-batch.

An answer is a sequence of the micro-batch, named by its number; a pair is never split over micro-batches. The losses
return a LossSum whose denominator counts pairs (or answers), so that they add up like all others.

N token, S sequence, P pair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rill.algorithms.base import LossSum, Metric
from rill.algorithms.checks import full_precision, zero_unless
from rill.algorithms.segments import seq_sum
from rill.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch:
    """One micro-batch of answers."""

    logprobs_N: Tensor
    """log π of the current policy; it carries a gradient."""
    mask_N: Tensor
    """1.0 on the answers' own tokens, else 0.0."""
    seq_N: Tensor
    num_seqs: int
    is_good_S: Tensor
    """bool: the answer was preferred, or thought desirable."""
    chosen_P: Tensor
    """int64: the preferred answer of each pair."""
    rejected_P: Tensor
    ref_logprobs_N: Tensor | None = None
    kl: float = 0.0
    """An estimate of KL(π ∥ π_ref) over the whole batch; see PreferenceLoss.needs_kl."""

    def total(self, values_N: Tensor) -> Tensor:
        """[S] the sum over each answer's own tokens."""
        own_N = zero_unless(self.mask_N > 0, full_precision(values_N))
        return seq_sum(own_N, self.seq_N, self.num_seqs)

    def lengths(self) -> Tensor:
        """[S] own tokens of each answer; none may be empty."""
        lengths_S = self.total(torch.ones_like(self.mask_N))
        if bool((lengths_S == 0).any()):
            raise TrainingError("an answer has no trained tokens: drop its pair")
        return lengths_S

    def log_ratio(self) -> Tensor:
        """[S] log π/π_ref of each answer."""
        if self.ref_logprobs_N is None:
            raise TrainingError("this loss compares with a reference, and the batch has none")
        return self.total(full_precision(self.logprobs_N) - full_precision(self.ref_logprobs_N))


class PreferenceLoss(ABC):
    needs_reference: bool = True
    """A frozen policy's log-probabilities are compared with."""
    needs_pairs: bool = True
    """False: an answer may come alone."""
    needs_kl: bool = False
    """PreferenceBatch.kl: the mean log π/π_ref of answers under other prompts, not below 0, over the whole batch."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, batch: PreferenceBatch) -> LossSum:
        """The micro-batch's share of the loss."""


def pair_loss(loss_P: Tensor, rewards_S: Tensor, batch: PreferenceBatch, **more: Metric) -> LossSum:
    """The sum over pairs, with what is worth knowing: `rewards_S` are what the policy implies of each answer."""
    ones_P = torch.ones_like(loss_P)
    chosen_P, rejected_P = rewards_S[batch.chosen_P], rewards_S[batch.rejected_P]
    return LossSum(
        numerator=loss_P.sum(),
        denominator=ones_P.sum(),
        metrics={
            "dpo/loss": Metric.mean(loss_P, ones_P),
            "dpo/accuracy": Metric.mean((chosen_P > rejected_P).to(loss_P.dtype), ones_P),
            "dpo/margin": Metric.mean(chosen_P - rejected_P, ones_P),
            "dpo/reward_chosen": Metric.mean(chosen_P, ones_P),
            "dpo/reward_rejected": Metric.mean(rejected_P, ones_P),
            **more,
        },
    )
