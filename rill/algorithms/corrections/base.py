"""What a correction is: a weight on each token's loss for having been sampled by μ and not by π_old.

w = exp(log π_old − log μ), or with π in place of π_old. Weights carry no gradient;
0 drops the token. Inputs arrive sanitised, as for losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from rill.algorithms.base import Metric, Need, Reduce, TokenBatch
from rill.algorithms.mismatch import MAX_LOG_RATIO, log_ratio
from rill.algorithms.segments import seq_sum

Level = Literal["token", "sequence"]
Policy = Literal["old", "current"]
"""Whose probability stands over μ's. old: π_old, beside a loss that holds π/π_old. current: π, beside a loss without
a ratio (reinforce), where w alone carries the step off μ; needs no old log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class CorrectionWeights:
    weights_N: Tensor
    """Multiplies the policy loss; detached."""
    kept_N: Tensor | None = None
    """1.0 where the token stays in the aggregation's denominator; None: all trained tokens do."""
    metrics: dict[str, Metric] = field(default_factory=dict)


class Correction(ABC):
    needs: frozenset[Need] = frozenset({Need.OLD_LOGPROBS})

    bounds: tuple[float, float] = (0.5, 2.0)
    """[lo, hi] of the metric mismatch/outside."""

    uses_rollout_ratio: bool = False
    """True where weights hold π/μ; a loss that holds it itself would count the mismatch twice."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        """The weight of each token."""

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        """Figures over the whole batch that `weights` reads from TokenBatch.statistics; none for most."""
        return {}


def importance_weights(batch: TokenBatch, level: Level, policy: Policy = "old") -> Tensor:
    """w_t = π_old/μ of the token, or of its whole sequence: exp Σ_{u∈s} (log π_old − log μ)_u. Detached."""
    numerator_N = batch.old_logprobs_N if policy == "old" else batch.logprobs_N
    x_N = log_ratio(numerator_N, batch.rollout_logprobs_N).detach() * batch.mask_N
    if level == "sequence":
        x_N = seq_sum(x_N, batch.seq_N, batch.num_seqs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[batch.seq_N]
    return x_N.exp()


def weight_needs(policy: Policy, *, normalise: bool) -> frozenset[Need]:
    needs = {Need.OLD_LOGPROBS} if policy == "old" else set()
    return frozenset(needs | {Need.STATISTICS} if normalise else needs)


def weight_metrics(weights_N: Tensor, mask_N: Tensor) -> dict[str, Metric]:
    """Moments of the weights as applied (finish_metrics makes correction/ess of them) and the share dropped."""
    return {
        "correction/weight_mean": Metric.mean(weights_N, mask_N),
        "correction/weight_sq_mean": Metric.mean(weights_N.square(), mask_N),
        "correction/dropped": Metric.mean((weights_N == 0).to(mask_N.dtype), mask_N),
    }
