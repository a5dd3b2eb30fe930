"""KL to the reference policy: per-token estimators, and controllers of its coefficient.

x = log π − log π_ref of the sampled token; a_t ~ π, so E[k1] = KL(π ∥ π_ref).

    k1   x                   unbiased, may be negative, and has no useful gradient as a loss (E ∇k1 = 0)
    k2   x²/2                biased value, and the right gradient: E ∇k2 = ∇KL
    k3   e^−x − 1 + x        unbiased and never negative; x clamped to ±20 and the value to ±10
    abs  |x|
    k3+  value of k3, gradient of k2 (straight through); likewise k1+
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from rill.algorithms.mismatch import log_ratio
from rill.config.base import Config, OneOf, PartConfig
from rill.registry import Registry

_MAX_K3 = 10.0


class KLEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"
    K1_STRAIGHT_THROUGH = "k1+"
    K3_STRAIGHT_THROUGH = "k3+"


def kl_penalty(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: KLEstimator) -> Tensor:
    """The estimator's value for each token, per the table above."""
    x_N = logprobs_N - ref_logprobs_N
    match estimator:
        case KLEstimator.K1:
            return x_N
        case KLEstimator.K2:
            return x_N.square() / 2
        case KLEstimator.K3:
            x_N = log_ratio(logprobs_N, ref_logprobs_N)  # only what is exponentiated needs a bound
            return ((-x_N).exp() - 1 + x_N).clamp(-_MAX_K3, _MAX_K3)
        case KLEstimator.ABS:
            return x_N.abs()
        case KLEstimator.K1_STRAIGHT_THROUGH:
            return _straight_through(x_N, x_N.square() / 2)
        case KLEstimator.K3_STRAIGHT_THROUGH:
            return _straight_through(kl_penalty(logprobs_N, ref_logprobs_N, KLEstimator.K3), x_N.square() / 2)


def _straight_through(value_N: Tensor, gradient_N: Tensor) -> Tensor:
    """`value_N` forward, the gradient of `gradient_N` backward."""
    return value_N.detach() + gradient_N - gradient_N.detach()


class FixedKL:
    """β stays what it was."""

    class Config(PartConfig):
        type: Literal["fixed"] = "fixed"

    def __init__(self, config: Config, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


class AdaptiveKL(FixedKL):
    """β ← β · (1 + clip(KL/target − 1, ±0.2) · n/horizon) (arXiv 1909.08593), n samples seen since."""

    class Config(PartConfig):
        type: Literal["adaptive"] = "adaptive"
        target: float = Field(0.1, gt=0)
        """The KL per token, in nats, that β is steered towards."""
        horizon: float = Field(10_000, gt=0)
        """Samples over which a constant error of 20 % changes β by 20 %."""

    def __init__(self, config: Config, coefficient: float) -> None:
        self.config = config
        self.coefficient = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        error = min(max(kl / self.config.target - 1.0, -0.2), 0.2)
        self.coefficient *= max(0.0, 1.0 + error * num_samples / self.config.horizon)


KL_CONTROLLERS = Registry(
    "KL controller", {"fixed": "rill.algorithms.kl:FixedKL", "adaptive": "rill.algorithms.kl:AdaptiveKL"}
)


class KLConfig(Config):
    """The penalty for leaving the reference policy."""

    coefficient: float = Field(0.0, ge=0)
    """β at the start. 0: off, and no reference model is needed."""
    place: Literal["loss", "reward"] = "loss"
    """loss: β·KL is added to each token's loss. reward: β·KL is taken from each token's reward."""
    estimator: KLEstimator = KLEstimator.K3
    """k1, k2, k3, abs, or the straight-through k1+ and k3+ for the loss."""
    controller: Annotated[PartConfig, OneOf(KL_CONTROLLERS)] = Field(default_factory=lambda: FixedKL.Config())
    """fixed, or adaptive towards a target KL."""

    @model_validator(mode="after")
    def _has_a_start(self) -> KLConfig:
        if self.controller.type == "adaptive" and self.coefficient == 0:
            raise ValueError(
                "an adaptive controller multiplies β, which is 0: set coefficient to where it starts"
            )
        return self
