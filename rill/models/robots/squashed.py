"""A normal distribution squashed into −1 … 1, its spread depending on the state: the actor of SAC.

    a = tanh(u),  u ~ N(μ(o), σ(o)²),  log π(a) = Σ_i log N(u_i) − log(1 − tanh²(u_i))

It has no value head: SAC's critics are the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from rill.models.robots.base import Evaluated, Policy, PolicyConfig
from rill.models.robots.inputs import Inputs
from rill.models.robots.trunk import Trunk, linear
from rill.types import RobotSpec

LOG_2PI = math.log(2 * math.pi)
LOG_STD_RANGE = (-5.0, 2.0)


class SquashedPolicy(Policy):
    class Config(PolicyConfig):
        type: Literal["squashed"] = "squashed"
        chunk: int = Field(default=1, ge=1)
        """Actions that are decided on at once; SAC wants 1."""
        width: int = Field(default=128, ge=8)
        depth: int = Field(default=2, ge=1)

    config: Config

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.shape = (config.chunk, spec.action_size)
        self.trunk = Trunk(spec, config.width, config.depth, word_size=16)
        self.head = linear(config.width, 2 * config.chunk * spec.action_size, 0.01)

    def decide(
        self, inputs: Inputs, generators: Sequence[np.random.Generator], *, greedy: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mean_BJA, log_std_BJA = self._normal(inputs)
        if not greedy:
            drawn = np.stack([g.standard_normal(self.shape, np.float32) for g in generators])
            mean_BJA = mean_BJA + log_std_BJA.exp() * torch.from_numpy(drawn).to(mean_BJA.device)
        return mean_BJA.tanh(), {"drawn": mean_BJA}

    def evaluate(self, inputs: Inputs, latents: Mapping[str, Tensor]) -> Evaluated:
        mean_BJA, log_std_BJA = self._normal(inputs)
        entropies_BJ = (log_std_BJA + 0.5 * (1.0 + LOG_2PI)).sum(-1)
        return Evaluated(
            squashed_logprobs(latents["drawn"], mean_BJA, log_std_BJA), entropies_BJ, self.values(inputs)
        )

    def values(self, inputs: Inputs) -> Tensor:
        return inputs.states_BS.new_zeros(len(inputs))

    def draw(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(actions [B, J, A], log π [B]) with gradients through the draw."""
        mean_BJA, log_std_BJA = self._normal(inputs)
        drawn_BJA = mean_BJA + log_std_BJA.exp() * torch.randn_like(mean_BJA)
        return drawn_BJA.tanh(), squashed_logprobs(drawn_BJA, mean_BJA, log_std_BJA).sum(-1)

    def imitation_loss(self, inputs: Inputs, actions_BJA: Tensor, mask_BJ: Tensor) -> Tensor:
        errors_BJ = 0.5 * (self._normal(inputs)[0].tanh() - actions_BJA).square().sum(-1)
        return (errors_BJ * mask_BJ).sum()

    def set_normaliser(self, states_NS: Tensor) -> None:
        self.trunk.set_normaliser(states_NS)

    def _normal(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        mean_BJA, log_std_BJA = self.head(self.trunk(inputs)).unflatten(-1, (2, *self.shape)).unbind(1)
        return mean_BJA, log_std_BJA.clamp(*LOG_STD_RANGE)


def squashed_logprobs(drawn_BJA: Tensor, mean_BJA: Tensor, log_std_BJA: Tensor) -> Tensor:
    """[B, J]. log(1 − tanh²(u)) = 2 (log 2 − u − softplus(−2u)), which does not underflow."""
    normal_BJA = -0.5 * ((drawn_BJA - mean_BJA) / log_std_BJA.exp()) ** 2 - log_std_BJA - 0.5 * LOG_2PI
    return (normal_BJA - 2.0 * (math.log(2.0) - drawn_BJA - softplus(-2.0 * drawn_BJA))).sum(-1)
