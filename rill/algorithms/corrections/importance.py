"""What corrections that weigh by importance have in common: truncated (tis.py) and masked (mis.py)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rill.algorithms.base import Need, Reduce, TokenBatch
from rill.algorithms.corrections.base import Correction, CorrectionWeights, weight_metrics
from rill.algorithms.mismatch import MAX_LOG_RATIO, log_ratio
from rill.algorithms.segments import seq_sum
from rill.config.base import PartConfig

MEAN_WEIGHT = "correction/mean_weight"


class ImportanceConfig(PartConfig):
    policy: Literal["old", "current"] = "old"
    """Whose probability stands over μ's. old: π_old, beside a loss that holds π/π_old. current: π, beside a loss
    without a ratio (reinforce), where w alone carries the step off μ; needs no old log-probabilities."""
    level: Literal["token", "sequence"] = "token"
    """token: each token's own ratio. sequence: the product over the sequence, for each of its tokens."""
    normalise: bool = False
    """Divide by the mean weight of the batch's tokens (or sequences): what is cut off does not shrink the step then."""


class ImportanceSampling(Correction):
    """A subclass bounds the weights."""

    config: ImportanceConfig

    def __init__(self, config: ImportanceConfig) -> None:
        super().__init__(config)
        needs = {Need.OLD_LOGPROBS} if config.policy == "old" else set()
        self.needs = frozenset(needs | {Need.STATISTICS} if config.normalise else needs)

    @abstractmethod
    def bounded(self, weights_N: Tensor) -> Tensor:
        """What becomes of the raw weights."""

    def kept(self, weights_N: Tensor) -> Tensor | None:
        """Which tokens stay in the aggregation's denominator, by their bounded weights; see CorrectionWeights."""
        return None

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        weights_N = self._unscaled(batch)
        kept_N = self.kept(weights_N)
        if self.config.normalise:
            weights_N = weights_N / self.figures(batch)[MEAN_WEIGHT].clamp(min=1e-8)
        return CorrectionWeights(
            weights_N=weights_N, kept_N=kept_N, metrics=weight_metrics(weights_N, batch.mask_N)
        )

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]:
        """The mean weight over the trained tokens, or sequences, of all micro-batches and ranks."""
        if not self.config.normalise:
            return {}
        counts = [self._counts(batch) for batch in batches]
        sums = [(self._unscaled(b) * count_N).sum() for b, count_N in zip(batches, counts, strict=True)]
        total = reduce(torch.stack(sums).sum())
        count = reduce(torch.stack([count_N.sum() for count_N in counts]).sum())
        return {MEAN_WEIGHT: total / count.clamp(min=1)}

    def _unscaled(self, batch: TokenBatch) -> Tensor:
        """From w_t = π_old/μ of the token, or of its whole sequence: exp Σ_{u∈s} (log π_old − log μ)_u. Detached."""
        numerator_N = batch.old_logprobs_N if self.config.policy == "old" else batch.logprobs_N
        x_N = log_ratio(numerator_N, batch.rollout_logprobs_N).detach() * batch.mask_N
        if self.config.level == "sequence":
            x_S = seq_sum(x_N, batch.seq_N, batch.num_seqs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            x_N = x_S[batch.seq_N]
        return self.bounded(x_N.exp())

    def _counts(self, batch: TokenBatch) -> Tensor:
        """What each token counts in a mean of weights: 1, or 1 / (its sequence's tokens) where the weight is the
        sequence's, which then counts once however long it is."""
        if self.config.level == "token":
            return batch.mask_N
        lengths_S = seq_sum(batch.mask_N, batch.seq_N, batch.num_seqs)
        return batch.mask_N / lengths_S.clamp(min=1)[batch.seq_N]
