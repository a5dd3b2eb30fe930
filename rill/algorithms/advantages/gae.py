"""PPO's generalised advantage estimation (arXiv 1506.02438) over the trained tokens of each sequence."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, BatchAdvantage
from rill.algorithms.base import Metric, Need, Reduce
from rill.algorithms.checks import required
from rill.algorithms.segments import discounted_tail
from rill.algorithms.whitening import moments, whiten
from rill.config.base import PartConfig


class GAE(BatchAdvantage):
    needs = frozenset({Need.VALUES})

    class Config(PartConfig):
        type: Literal["gae"] = "gae"
        gamma: float = Field(1.0, ge=0, le=1)
        """γ: discount per trained token."""
        lam: float = Field(0.95, ge=0, le=1)
        """λ: 1 is reward-to-go minus value, 0 is the one-step error."""
        whiten: bool = True
        """Standardise advantages over the trained tokens of all ranks."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def batch(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        values_N = required(batch, "values_N")
        raw_N = gae(
            rewards_N,
            values_N,
            batch.mask_N,
            batch.seq_N,
            bootstrap_values_S=batch.bootstrap_values_S,
            gamma=self.config.gamma,
            lam=self.config.lam,
        )
        returns_N = (raw_N + values_N) * batch.mask_N
        advantages_N = whiten(raw_N, batch.mask_N, reduce) if self.config.whiten else raw_N
        _, error_variance = moments(raw_N, batch.mask_N, reduce)
        _, return_variance = moments(returns_N, batch.mask_N, reduce)
        unexplained = (error_variance / return_variance.clamp(min=1e-8)).to(rewards_N.dtype)
        one = torch.ones_like(unexplained)
        metrics = {"value/explained_variance": Metric(total=1 - unexplained, weight=one)}
        return Advantages(advantages_N=advantages_N, returns_N=returns_N, metrics=metrics)


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    mask_N: Tensor,
    seq_N: Tensor,
    *,
    bootstrap_values_S: Tensor | None,
    gamma: float,
    lam: float,
) -> Tensor:
    """δ_t = r_t + γ V_{t+1} − V_t,  A_t = Σ_k (γλ)^k δ_{t+k}; t runs over trained tokens, others get 0.

    Observations between two turns are skipped: the next state of a turn's last token is that of the next turn's
    first. After the last token V is 0, or the bootstrap value of an episode that was cut off.
    """
    index_M = torch.nonzero(mask_N > 0).squeeze(1)  # M trained token
    rewards_M, values_M, seq_M = rewards_N[index_M], values_N[index_M], seq_N[index_M]
    next_M = torch.zeros_like(values_M)
    if index_M.numel():
        is_last_M = torch.ones_like(seq_M, dtype=torch.bool)
        is_last_M[:-1] = seq_M[1:] != seq_M[:-1]
        next_M[:-1] = values_M[1:]
        ends_M = (
            torch.zeros_like(values_M)
            if bootstrap_values_S is None
            else bootstrap_values_S.to(values_M)[seq_M]
        )
        next_M = torch.where(is_last_M, ends_M, next_M)
    delta_M = rewards_M + gamma * next_M - values_M
    advantages_M = discounted_tail(delta_M, seq_M, gamma * lam)
    return torch.zeros_like(values_N).index_put((index_M,), advantages_M)
