"""A normal distribution over every number of a chunk: the MLP that simulators' users expect.

    log π(a_j | o) = Σ_i log N(a[j, i]; μ[j, i](o), σ[j, i]),  σ learned, the same in every state

What is drawn may lie outside −1 … 1; it is cut before it is executed and kept as it was drawn, so that the probability
is that of the draw. `NormalPolicy` is what it has in common with squashed.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from rill.policies.base import Evaluated, Policy, PolicyConfig
from rill.policies.draws import Draws
from rill.policies.inputs import Inputs
from rill.policies.trunk import Trunk, linear
from rill.types import RobotSpec

LOG_2PI = math.log(2 * math.pi)


class NormalConfig(PolicyConfig):
    chunk: int = Field(default=1, ge=1)
    """Actions that are decided on at once."""
    width: int = Field(default=64, ge=8)
    depth: int = Field(default=2, ge=1)


class Encoded(NamedTuple):
    mean_BJA: Tensor
    log_std_BJA: Tensor
    """May lack B."""
    values_B: Tensor


class NormalPolicy(Policy):
    """Draws u ~ N(μ(o), σ²) and does `squash(u)`."""

    config: NormalConfig

    def __init__(self, config: NormalConfig, spec: RobotSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.shape = (config.chunk, spec.action_size)
        self.trunk = Trunk(spec, config.width, config.depth, word_size=16)

    @abstractmethod
    def normal(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(μ [B, J, A], log σ, which may lack B)."""

    def squash(self, drawn_BJA: Tensor) -> Tensor:
        return drawn_BJA

    def logprobs(self, drawn_BJA: Tensor, mean_BJA: Tensor, log_std_BJA: Tensor) -> Tensor:
        """[B, J]: of what is done."""
        scaled_BJA = (drawn_BJA - mean_BJA) / log_std_BJA.exp()
        return (-0.5 * scaled_BJA**2 - log_std_BJA - 0.5 * LOG_2PI).sum(-1)

    def encode(self, inputs: Inputs) -> Encoded:
        return Encoded(*self.normal(inputs), self.values(inputs))

    def decide(self, encoded: Encoded, draws: Draws, *, greedy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        drawn_BJA = encoded.mean_BJA
        if not greedy:
            drawn_BJA = drawn_BJA + encoded.log_std_BJA.exp() * draws.normal(*self.shape)
        return self.squash(drawn_BJA), {"drawn": drawn_BJA}

    def score(self, encoded: Encoded, latents: Mapping[str, Tensor]) -> Evaluated:
        mean_BJA, log_std_BJA, values_B = encoded
        entropies_BJ = (log_std_BJA + 0.5 * (1.0 + LOG_2PI)).sum(-1).expand(len(mean_BJA), -1)
        logprobs_BJ = self.logprobs(latents["drawn"], mean_BJA, log_std_BJA)
        return Evaluated(logprobs_BJ, entropies_BJ, values_B)

    def imitation_loss(self, inputs: Inputs, actions_BJA: Tensor, mask_BJ: Tensor) -> Tensor:
        errors_BJ = 0.5 * (self.squash(self.normal(inputs)[0]) - actions_BJA).square().sum(-1)
        return (errors_BJ * mask_BJ).sum()


class GaussianPolicy(NormalPolicy):
    class Config(NormalConfig):
        type: Literal["gaussian"] = "gaussian"
        initial_std: float = Field(default=0.6, gt=0)

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        super().__init__(config, spec)
        self.critic = Trunk(spec, config.width, config.depth, word_size=16)
        self.mean = linear(config.width, config.chunk * spec.action_size, 0.01)
        self.log_std_JA = nn.Parameter(torch.full(self.shape, math.log(config.initial_std)))
        self.value = linear(config.width, 1, 1.0)

    def normal(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.mean(self.trunk(inputs)).unflatten(-1, self.shape), self.log_std_JA

    def values(self, inputs: Inputs) -> Tensor:
        found: Tensor = self.value(self.critic(inputs)).squeeze(-1)
        return found
