"""Online DPO (arXiv 2402.04792): the best and the worst answer of a group are a preference pair.

The gradient of −log σ(βh) is that of −Σ A log π with A = ±β σ(−βh), h the pair's margin under the policy that the step
starts from. So the pair is an advantage, exact for one optimizer step per batch, and the loss is REINFORCE's. With the
sequence mean as aggregation (two answers to a pair) A is doubled, which makes the loss the mean over pairs.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, TokenAdvantage
from rill.algorithms.base import Metric, Need, Reduce
from rill.algorithms.checks import required
from rill.algorithms.segments import seq_sum
from rill.config.base import PartConfig


class OnlineDPO(TokenAdvantage):
    needs = frozenset({Need.REWARD_LOGPROBS, Need.REF_LOGPROBS})
    scope = Scope.GROUP
    min_samples = 2
    allows_steps = False

    class Config(PartConfig):
        type: Literal["online_dpo"] = "online_dpo"
        beta: float = Field(0.1, gt=0)
        """Strength of the tie to the reference."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """±2β σ(−βh) on the best and the worst of a group, h = log π/π_ref(best) − log π/π_ref(worst); a group whose
        rewards are all equal has no pair. What has no trained token is in none."""
        ratio_N = (required(batch, "logprobs_N") - required(batch, "ref_logprobs_N")) * batch.mask_N
        ratio_S = seq_sum(ratio_N, batch.seq_N, batch.num_seqs)
        advantages_S = torch.zeros_like(ratio_S)
        margins: list[Tensor] = []
        group_S = required(batch, "group_S")
        is_trained_S = seq_sum(batch.mask_N, batch.seq_N, batch.num_seqs) > 0
        for group in torch.unique(group_S[is_trained_S]).tolist():
            members = torch.nonzero((group_S == group) & is_trained_S).squeeze(1)
            best, worst = (
                members[batch.rewards_S[members].argmax()],
                members[batch.rewards_S[members].argmin()],
            )
            if batch.rewards_S[best] == batch.rewards_S[worst]:
                continue
            margin = ratio_S[best] - ratio_S[worst]
            push = 2 * self.config.beta * torch.sigmoid(-self.config.beta * margin)
            advantages_S[best], advantages_S[worst] = push, -push
            margins.append(margin)
        found = torch.stack(margins) if margins else ratio_S.new_zeros(0)
        ones = torch.ones_like(found)
        return Advantages(
            advantages_N=advantages_S[batch.seq_N] * batch.mask_N,
            left_out_S=advantages_S == 0,
            metrics={
                "dpo/margin": Metric.mean(self.config.beta * found, ones),
                "dpo/accuracy": Metric.mean((found > 0).to(ones.dtype), ones),
            },
        )
