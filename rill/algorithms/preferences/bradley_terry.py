"""The Bradley–Terry loss of a reward model: the preferred answer's score is to be the higher one.

P pair.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from rill.algorithms.base import LossSum, Metric
from rill.algorithms.checks import full_precision, require_finite
from rill.config.base import Config
from rill.errors import TrainingError


class BradleyTerryConfig(Config):
    centre: float = Field(0.0, ge=0)
    """Times (r_chosen + r_rejected)², which keeps rewards around 0. 0: off."""


def bradley_terry_loss(
    chosen_scores_P: Tensor,
    rejected_scores_P: Tensor,
    config: BradleyTerryConfig,
    margins_P: Tensor | None = None,
) -> LossSum:
    """−log σ(r_chosen − r_rejected − margin) + c (r_chosen + r_rejected)²; a margin is how much better it was rated."""
    chosen_P, rejected_P = full_precision(chosen_scores_P), full_precision(rejected_scores_P)
    if chosen_P.shape != rejected_P.shape:
        raise TrainingError(f"{chosen_P.numel()} chosen but {rejected_P.numel()} rejected scores")
    lead_P = chosen_P - rejected_P
    require_finite({"score differences": lead_P})
    wanted_P = lead_P if margins_P is None else lead_P - margins_P
    loss_P = -logsigmoid(wanted_P) + config.centre * (chosen_P + rejected_P).square()
    ones_P = torch.ones_like(loss_P)
    return LossSum(
        numerator=loss_P.sum(),
        denominator=ones_P.sum(),
        metrics={
            "reward_model/loss": Metric.mean(loss_P, ones_P),
            "reward_model/accuracy": Metric.mean((lead_P > 0).to(loss_P.dtype), ones_P),
            "reward_model/lead": Metric.mean(lead_P, ones_P),
            "reward_model/score": Metric.mean((chosen_P + rejected_P) / 2, ones_P),
        },
    )
