"""A normal distribution over every number of a chunk: the MLP that simulators' users expect.

    log π(a_j | o) = Σ_i log N(a[j, i]; μ[j, i](o), σ[j, i]),  σ learned, the same in every state

What is drawn may lie outside −1 … 1; it is cut before it is executed and kept as it was drawn, so that the probability
is that of the draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rill.models.robots.base import Evaluated, Policy, PolicyConfig
from rill.models.robots.inputs import Inputs
from rill.models.robots.trunk import Trunk, linear
from rill.types import RobotSpec

LOG_2PI = math.log(2 * math.pi)


class GaussianPolicy(Policy):
    class Config(PolicyConfig):
        type: Literal["gaussian"] = "gaussian"
        chunk: int = Field(default=1, ge=1)
        """Actions that are decided on at once."""
        width: int = Field(default=64, ge=8)
        depth: int = Field(default=2, ge=1)
        initial_std: float = Field(default=0.6, gt=0)

    config: Config

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.shape = (config.chunk, spec.action_size)
        self.trunk = Trunk(spec, config.width, config.depth, word_size=16)
        self.critic = Trunk(spec, config.width, config.depth, word_size=16)
        self.mean = linear(config.width, config.chunk * spec.action_size, 0.01)
        self.log_std_JA = nn.Parameter(torch.full(self.shape, math.log(config.initial_std)))
        self.value = linear(config.width, 1, 1.0)

    def decide(
        self, inputs: Inputs, generators: Sequence[np.random.Generator], *, greedy: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mean_BJA = self._mean(inputs)
        if not greedy:
            drawn = np.stack([g.standard_normal(self.shape, np.float32) for g in generators])
            mean_BJA = mean_BJA + self.log_std_JA.exp() * torch.from_numpy(drawn).to(mean_BJA.device)
        return mean_BJA, {"drawn": mean_BJA}

    def evaluate(self, inputs: Inputs, latents: Mapping[str, Tensor]) -> Evaluated:
        mean_BJA = self._mean(inputs)
        scaled_BJA = (latents["drawn"] - mean_BJA) / self.log_std_JA.exp()
        logprobs_BJA = -0.5 * scaled_BJA**2 - self.log_std_JA - 0.5 * LOG_2PI
        entropies_J = (self.log_std_JA + 0.5 * (1.0 + LOG_2PI)).sum(-1)
        return Evaluated(logprobs_BJA.sum(-1), entropies_J.expand(len(mean_BJA), -1), self.values(inputs))

    def values(self, inputs: Inputs) -> Tensor:
        found: Tensor = self.value(self.critic(inputs)).squeeze(-1)
        return found

    def imitation_loss(self, inputs: Inputs, actions_BJA: Tensor, mask_BJ: Tensor) -> Tensor:
        errors_BJ = 0.5 * (self._mean(inputs) - actions_BJA).square().sum(-1)
        return (errors_BJ * mask_BJ).sum()

    def set_normaliser(self, states_NS: Tensor) -> None:
        self.trunk.set_normaliser(states_NS)
        self.critic.set_normaliser(states_NS)

    def _mean(self, inputs: Inputs) -> Tensor:
        mean_BJA: Tensor = self.mean(self.trunk(inputs)).unflatten(-1, self.shape)
        return mean_BJA
