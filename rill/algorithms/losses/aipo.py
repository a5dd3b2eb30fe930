"""AIPO (LlamaRL arXiv 2505.24034; in prime-rl's token-level form): the ratio to the sampling policy, cut off above.

Made for asynchronous runs: μ may be several versions old, and no old policy is needed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config.base import PartConfig


class AIPO(PolicyLoss):
    needs = frozenset()
    uses_rollout_ratio = True

    class Config(PartConfig):
        type: Literal["aipo"] = "aipo"
        delta: float = Field(8.0, gt=0)
        """δ: the ratio is cut off here."""
        keep_gradient: bool = False
        """False: a cut-off token has no gradient, L = −min(π/μ, δ)·A.
        True: it keeps one of weight δ, L = −sg[min(π/μ, δ)]·A·log π."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        log_ratio_N = log_ratio(batch.logprobs_N, batch.rollout_logprobs_N)
        ratio_N = log_ratio_N.exp()
        weight_N = ratio_N.clamp(max=self.config.delta)
        if self.config.keep_gradient:
            loss_N = -weight_N.detach() * batch.advantages_N * batch.logprobs_N
        else:
            loss_N = -weight_N * batch.advantages_N
        clipped_N = ratio_N.detach() > self.config.delta
        return TokenLoss(loss_N=loss_N, metrics=ratio_metrics(log_ratio_N, clipped_N, batch.mask_N))
