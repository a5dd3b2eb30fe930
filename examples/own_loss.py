"""An algorithm of your own: here a policy loss that learns from better-than-average answers only.

    rill train demo algorithm.loss.type=examples.own_loss:BetterHalf

Advantages, corrections, filters and aggregation stay what `[algorithm]` says; an advantage of your own is a class of
the same kind under `algorithm.advantage.type`. N is the token; masked tokens arrive as 0 and count in no mean.
"""

from pydantic import Field

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss, ratio_metrics
from rill.algorithms.mismatch import log_ratio
from rill.config import PartConfig


class BetterHalf(PolicyLoss):
    """L = −min(π/π_old, 1 + high) · max(A, 0)"""

    class Config(PartConfig):
        high: float = Field(0.2, gt=0)
        """How far the ratio may rise above 1."""

    config: Config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        log_ratio_N = log_ratio(batch.logprobs_N, batch.old_logprobs_N)
        ratio_N = log_ratio_N.exp()
        most = 1.0 + self.config.high
        loss_N = -ratio_N.clamp(max=most) * batch.advantages_N.clamp(min=0.0)
        return TokenLoss(
            loss_N=loss_N, metrics=ratio_metrics(log_ratio_N, ratio_N.detach() > most, batch.mask_N)
        )
