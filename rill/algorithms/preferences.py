"""Learning from pairs: DPO and its kin, and the Bradley–Terry loss of a reward model.

Pairs are two sequences of one flat micro-batch, named by index; a pair is never split over micro-batches. The
losses return a LossSum whose denominator is the number of pairs, so that they add up like all others.

N token, S sequence, P pair.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rill.algorithms.base import LossSum, Metric
from rill.algorithms.checks import full_precision, require_finite, zero_unless
from rill.algorithms.segments import seq_sum
from rill.config.base import Config
from rill.errors import TrainingError


class DPOConfig(Config):
    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """sigmoid: DPO. hinge: SLiC. ipo: IPO, where beta is its regularisation τ."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of labels thought to be wrong (conservative DPO; sigmoid only). 0: off."""
    length_normalised: bool = False
    """Mean instead of sum of log-probabilities over a sequence. IPO always takes the mean."""

    @model_validator(mode="after")
    def _smoothing_is_used(self) -> DPOConfig:
        if self.label_smoothing > 0 and self.loss != "sigmoid":
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} belongs to loss = 'sigmoid', got {self.loss!r}: set it to 0"
            )
        return self


class BradleyTerryConfig(Config):
    centre: float = Field(0.0, ge=0)
    """Times (r_chosen + r_rejected)², which keeps rewards around 0. 0: off."""


def dpo_loss(
    logprobs_N: Tensor,
    ref_logprobs_N: Tensor,
    mask_N: Tensor,
    seq_N: Tensor,
    num_seqs: int,
    chosen_P: Tensor,
    rejected_P: Tensor,
    config: DPOConfig,
) -> LossSum:
    """h = [log π/π_ref](chosen) − [log π/π_ref](rejected), summed (or averaged) over trained tokens.

    sigmoid: −(1 − s) log σ(βh) − s log σ(−βh)   (arXiv 2305.18290; s label smoothing)
    hinge:   max(0, 1 − βh)                       (arXiv 2305.10425)
    ipo:     (h − 1/(2β))², h averaged            (arXiv 2310.12036)
    """
    is_on_N = mask_N > 0
    ratio_N = zero_unless(is_on_N, full_precision(logprobs_N) - full_precision(ref_logprobs_N))
    ratio_S = seq_sum(ratio_N, seq_N, num_seqs)
    lengths_S = seq_sum(is_on_N.to(ratio_S.dtype), seq_N, num_seqs)
    if bool((lengths_S[torch.cat([chosen_P, rejected_P])] == 0).any()):
        raise TrainingError("a preference pair has an answer without trained tokens: drop the pair")
    if config.length_normalised or config.loss == "ipo":
        ratio_S = ratio_S / lengths_S.clamp(min=1)
    chosen_ratio_P, rejected_ratio_P = ratio_S[chosen_P], ratio_S[rejected_P]
    margin_P = chosen_ratio_P - rejected_ratio_P
    require_finite({"log-ratio margins": margin_P})
    loss_P = _preference(margin_P, config)
    ones_P = torch.ones_like(loss_P)
    return LossSum(
        numerator=loss_P.sum(),
        denominator=ones_P.sum(),
        metrics={
            "dpo/loss": Metric.mean(loss_P, ones_P),
            "dpo/accuracy": Metric.mean((margin_P > 0).to(loss_P.dtype), ones_P),
            "dpo/margin": Metric.mean(config.beta * margin_P, ones_P),
            "dpo/reward_chosen": Metric.mean(config.beta * chosen_ratio_P, ones_P),
            "dpo/reward_rejected": Metric.mean(config.beta * rejected_ratio_P, ones_P),
        },
    )


def _preference(margin_P: Tensor, config: DPOConfig) -> Tensor:
    if config.loss == "hinge":
        return relu(1.0 - config.beta * margin_P)
    if config.loss == "ipo":
        return (margin_P - 1.0 / (2.0 * config.beta)).square()
    smoothing = config.label_smoothing
    logit_P = config.beta * margin_P
    return -(1.0 - smoothing) * logsigmoid(logit_P) - smoothing * logsigmoid(-logit_P)


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
