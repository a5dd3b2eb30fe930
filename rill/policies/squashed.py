"""A normal distribution squashed into −1 … 1, its spread depending on the state: the actor of SAC.

    a = tanh(u),  u ~ N(μ(o), σ(o)²),  log π(a) = Σ_i log N(u_i) − log(1 − tanh²(u_i))

It has no value head: SAC's critics are the trainer's.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from rill.policies.gaussian import NormalConfig, NormalPolicy
from rill.policies.inputs import Inputs
from rill.policies.trunk import linear
from rill.types import RobotSpec

LOG_STD_RANGE = (-5.0, 2.0)


class SquashedPolicy(NormalPolicy):
    class Config(NormalConfig):
        type: Literal["squashed"] = "squashed"
        width: int = Field(default=128, ge=8)

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        super().__init__(config, spec)
        self.head = linear(config.width, 2 * config.chunk * spec.action_size, 0.01)

    def normal(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        mean_BJA, log_std_BJA = self.head(self.trunk(inputs)).unflatten(-1, (2, *self.shape)).unbind(1)
        return mean_BJA, log_std_BJA.clamp(*LOG_STD_RANGE)

    def squash(self, drawn_BJA: Tensor) -> Tensor:
        return drawn_BJA.tanh()

    def logprobs(self, drawn_BJA: Tensor, mean_BJA: Tensor, log_std_BJA: Tensor) -> Tensor:
        """log(1 − tanh²(u)) = 2 (log 2 − u − softplus(−2u)), which does not underflow."""
        squeezed_BJA = 2.0 * (math.log(2.0) - drawn_BJA - softplus(-2.0 * drawn_BJA))
        return super().logprobs(drawn_BJA, mean_BJA, log_std_BJA) - squeezed_BJA.sum(-1)

    def values(self, inputs: Inputs) -> Tensor:
        return inputs.states_BS.new_zeros(len(inputs))

    def draw(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(actions [B, J, A], log π [B]) with gradients through the draw."""
        mean_BJA, log_std_BJA = self.normal(inputs)
        drawn_BJA = mean_BJA + log_std_BJA.exp() * torch.randn_like(mean_BJA)
        return self.squash(drawn_BJA), self.logprobs(drawn_BJA, mean_BJA, log_std_BJA).sum(-1)
