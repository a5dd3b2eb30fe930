"""ORPO (arXiv 2403.07691): supervised training on the preferred answer plus its odds over the other. No reference."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch.nn.functional import logsigmoid

from rill.algorithms.base import LossSum, Metric
from rill.algorithms.checks import require_finite
from rill.algorithms.preferences.base import PreferenceBatch, PreferenceLoss, pair_loss
from rill.config.base import PartConfig

_LARGEST = -1e-7
"""Mean log-probabilities are at most this: odds of a certain answer are infinite."""


class ORPO(PreferenceLoss):
    needs_reference = False

    class Config(PartConfig):
        type: Literal["orpo"] = "orpo"
        beta: float = Field(0.1, gt=0)
        """λ of the paper: the weight of the odds ratio beside the supervised loss."""

    config: Config

    def __call__(self, batch: PreferenceBatch) -> LossSum:
        """−m_w − β log σ( log odds_w − log odds_l ), m the mean log-probability of an answer's tokens and
        log odds = m − log(1 − e^m)."""
        mean_S = batch.total(batch.logprobs_N) / batch.lengths()
        safe_S = mean_S.clamp(max=_LARGEST)
        odds_S = safe_S - torch.log1p(-safe_S.exp())
        lead_P = odds_S[batch.chosen_P] - odds_S[batch.rejected_P]
        require_finite({"log odds": lead_P})
        imitation_P = -mean_S[batch.chosen_P]
        loss_P = imitation_P - self.config.beta * logsigmoid(lead_P)
        nll = Metric.mean(imitation_P, torch.ones_like(loss_P))
        return pair_loss(loss_P, self.config.beta * odds_S, batch, **{"dpo/nll": nll})
