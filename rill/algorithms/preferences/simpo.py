"""SimPO (arXiv 2405.14734): DPO without a reference, on the mean log-probability, with a margin to reach."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch.nn.functional import logsigmoid

from rill.algorithms.base import LossSum
from rill.algorithms.checks import require_finite
from rill.algorithms.preferences.base import PreferenceBatch, PreferenceLoss, pair_loss
from rill.config.base import PartConfig


class SimPO(PreferenceLoss):
    needs_reference = False

    class Config(PartConfig):
        type: Literal["simpo"] = "simpo"
        beta: float = Field(2.0, gt=0)
        """Times the mean log-probability of an answer's tokens."""
        gamma: float = Field(1.0, ge=0)
        """The margin by which the preferred answer should lead; the paper takes 0.15 to 0.8 of beta."""

    config: Config

    def __call__(self, batch: PreferenceBatch) -> LossSum:
        """−log σ( β·mean log π(chosen) − β·mean log π(rejected) − γ )."""
        rewards_S = self.config.beta * batch.total(batch.logprobs_N) / batch.lengths()
        lead_P = rewards_S[batch.chosen_P] - rewards_S[batch.rejected_P]
        require_finite({"mean log-probabilities": lead_P})
        return pair_loss(-logsigmoid(lead_P - self.config.gamma), rewards_S, batch)
