"""PPO's generalised advantage estimation (arXiv 1506.02438) over the trained tokens of each sequence, with VAPO's
length-adaptive λ and a λ of its own for the critic (arXiv 2504.05118)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, TokenAdvantage
from rill.algorithms.base import Metric, Need, Reduce
from rill.algorithms.checks import required
from rill.algorithms.segments import discounted_tail, seq_sum
from rill.algorithms.whitening import moments, whiten
from rill.config.base import PartConfig


class GAE(TokenAdvantage):
    needs = frozenset({Need.VALUES})

    class Config(PartConfig):
        type: Literal["gae"] = "gae"
        gamma: float = Field(1.0, ge=0, le=1)
        """γ: discount per trained token."""
        lam: float = Field(0.95, ge=0, le=1)
        """λ: 1 is reward-to-go minus value, 0 is the one-step error."""
        length_alpha: float = Field(0.0, ge=0)
        """α of a λ that grows with the answer: 1 − 1/(α · trained tokens), not below 0, in place of lam. VAPO: 0.05.
        0: off."""
        critic_lam: float | None = Field(None, ge=0, le=1)
        """λ of the returns that the critic learns. VAPO: 1. None: the policy's."""
        whiten: bool = True
        """Standardise advantages over the trained tokens of all ranks."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scope = Scope.BATCH if config.whiten else Scope.SAMPLE

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        values_N = required(batch, "values_N")
        config = self.config

        def raw(lam: float | Tensor) -> Tensor:
            return gae(rewards_N, values_N, batch.mask_N, batch.seq_N, gamma=config.gamma, lam=lam)

        raw_N = raw(self.policy_lam(batch))
        errors_N = raw_N if config.critic_lam is None else raw(config.critic_lam)
        returns_N = (errors_N + values_N) * batch.mask_N
        advantages_N = whiten(raw_N, batch.mask_N, reduce) if config.whiten else raw_N
        metrics = {"value/explained_variance": explained_variance(errors_N, returns_N, batch.mask_N, reduce)}
        return Advantages(advantages_N=advantages_N, returns_N=returns_N, metrics=metrics)

    def policy_lam(self, batch: AdvantageBatch) -> float | Tensor:
        """λ, or of each token λ_s = 1 − 1/(α L_s)."""
        if self.config.length_alpha == 0:
            return self.config.lam
        lengths_S = seq_sum(batch.mask_N, batch.seq_N, batch.num_seqs).clamp(min=1)
        return (1 - 1 / (self.config.length_alpha * lengths_S)).clamp(min=0)[batch.seq_N]


def explained_variance(errors_N: Tensor, returns_N: Tensor, mask_N: Tensor, reduce: Reduce) -> Metric:
    """1 − Var(R − V) / Var(R) over the trained tokens of all ranks; a chunk without any has no say."""
    zero = torch.zeros((), dtype=torch.float64, device=mask_N.device)
    if float(reduce(mask_N.double().sum())) == 0:
        return Metric(total=zero, weight=zero)
    _, error_variance = moments(errors_N, mask_N, reduce)
    _, return_variance = moments(returns_N, mask_N, reduce)
    return Metric(total=1 - error_variance / return_variance.clamp(min=1e-8), weight=zero + 1)


def gae(
    rewards_N: Tensor, values_N: Tensor, mask_N: Tensor, seq_N: Tensor, *, gamma: float, lam: float | Tensor
) -> Tensor:
    """δ_t = r_t + γ V_{t+1} − V_t,  A_t = Σ_k (γλ)^k δ_{t+k}; t runs over trained tokens, others get 0.

    Observations between two turns are skipped: the next state of a turn's last token is that of the next turn's
    first. After the last token V is 0. A λ for each token is constant within a sequence.
    """
    index_M = torch.nonzero(mask_N > 0).squeeze(1)  # M trained token
    rewards_M, values_M, seq_M = rewards_N[index_M], values_N[index_M], seq_N[index_M]
    next_M = torch.zeros_like(values_M)
    next_M[:-1] = torch.where(seq_M[1:] == seq_M[:-1], values_M[1:], next_M[:-1])
    delta_M = rewards_M + gamma * next_M - values_M
    decay = gamma * (lam[index_M] if isinstance(lam, Tensor) else lam)
    advantages_M = discounted_tail(delta_M, seq_M, decay)
    return torch.zeros_like(values_N).index_put((index_M,), advantages_M)
