"""Flow policies: a chunk is what noise becomes along a learned velocity field; two ways to give it a probability.

    x_t = t ε + (1 − t) a,  v = ε − a,  t: 1 → 0 in K steps of δ = 1/K       x̂0 = x − t v,  x̂1 = x + (1 − t) v

Flow-SDE: one step, drawn at random, is noisy, with the marginals of the flow; the others follow the field.
    σ_t = η √(t / (1 − t))  (at t = 1 the next t in the denominator)
    μ = (1 − t + δ) x̂0 + (t − δ − σ² δ / 2t) x̂1,  log π = log N(x_{k+1}; μ, σ² δ)
Flow-Noise: every step is noisy, with a learned spread.
    μ = x − δ v,  log π = log N(x_0; 0, 1) + Σ_k log N(x_{k+1}; μ_k, σ_θ²),  σ_θ in [0.08, 0.16]

Evaluations follow the field without noise. Only what is executed is noised, so only that is counted: of a pretrained
model's longer and wider chunk (`drawn`) the first J actions of A numbers. The field is an MLP here, π0 in pi0.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from rill.policies.base import Evaluated, Policy, PolicyConfig
from rill.policies.draws import Draws
from rill.policies.inputs import Inputs
from rill.policies.trunk import Trunk, linear
from rill.types import RobotSpec

LOG_2PI = math.log(2 * math.pi)
LEAST_STD, LARGEST_STD = 0.08, 0.16


class FlowConfig(PolicyConfig):
    """What every flow policy has."""

    num_steps: int = Field(default=4, ge=2)
    """K: evaluations of the field for a chunk."""
    noise: Literal["sde", "learned"] = "sde"
    """"sde": Flow-SDE; "learned": Flow-Noise."""
    eta: float = Field(default=0.5, gt=0)
    """How strong the noise of Flow-SDE is."""


class Encoded(NamedTuple):
    inputs: Inputs
    seen_BD: Tensor


class FlowPolicy(Policy):
    """A field and its noise. Subclasses compute `encode`, `velocity` and `value_of`."""

    class Config(FlowConfig):
        type: Literal["flow"] = "flow"
        width: int = Field(default=128, ge=8)
        depth: int = Field(default=2, ge=1)

    config: FlowConfig

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        super().__init__()
        self.build(config, spec)
        size = config.chunk * spec.action_size
        self.trunk = Trunk(spec, config.width, config.depth, word_size=16)
        self.critic = Trunk(spec, config.width, config.depth, word_size=16)
        self.field = nn.Sequential(
            linear(config.width + size + 3, config.width, 2**0.5),
            nn.SiLU(),
            linear(config.width, config.width, 2**0.5),
            nn.SiLU(),
            linear(config.width, size, 0.1),
        )
        self.value: nn.Module = linear(config.width, 1, 1.0)

    def build(self, config: FlowConfig, spec: RobotSpec, drawn: tuple[int, int] | None = None) -> None:
        """What all flow policies hold."""
        self.config, self.spec = config, spec
        self.shape = (config.chunk, spec.action_size)
        self.drawn = drawn or self.shape
        self.spread_JA = nn.Parameter(torch.zeros(self.shape)) if config.noise == "learned" else None

    # --- what a body computes -----------------------------------------------------------------------------

    def encode(self, inputs: Inputs) -> Any:
        """What the field needs of an observation, computed once for all steps."""
        return Encoded(inputs, self.trunk(inputs))

    def velocity(self, encoded: Any, x_BJA: Tensor, time_B: Tensor) -> Tensor:
        angle = math.pi * time_B[:, None]
        time_B3 = torch.cat([time_B[:, None], angle.cos(), angle.sin()], dim=1)
        field: Tensor = self.field(torch.cat([encoded.seen_BD, x_BJA.flatten(1), time_B3], dim=1))
        return field.view(len(field), *self.shape)

    def value_of(self, encoded: Any) -> Tensor:
        found: Tensor = self.value(self.critic(encoded.inputs)).squeeze(-1)
        return found

    # --- drawing ------------------------------------------------------------------------------------------

    def decide(self, encoded: Any, draws: Draws, *, greedy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        steps = self.config.num_steps
        noise_BNJA = draws.normal(steps + 1, *self.drawn)
        noisy_B = draws.integer(steps)
        device = noisy_B.device
        chain = [noise_BNJA[:, 0]]
        for k in range(steps):
            x_BJA = chain[-1]
            time_B = torch.full((len(x_BJA),), 1.0 - k / steps, device=device)
            v_BJA = self.velocity(encoded, x_BJA, time_B)
            following_BJA = x_BJA - v_BJA / steps
            if not greedy:
                mean_BJA, std_BJA = self.step(x_BJA, v_BJA, time_B)
                drawn_BJA = mean_BJA + std_BJA * self._counted(noise_BNJA[:, k + 1])
                is_noisy_B = (noisy_B == k) | (self.config.noise == "learned")
                noisy_BJA = following_BJA.clone()
                noisy_BJA[:, : self.shape[0], : self.shape[1]] = drawn_BJA
                following_BJA = torch.where(is_noisy_B[:, None, None], noisy_BJA, following_BJA)
            chain.append(following_BJA)
        actions_BJA = self.denormalised(self._counted(chain[-1]))
        chain_BNJA = torch.stack(chain, dim=1)
        if self.config.noise == "learned":
            return actions_BJA, {"chain": chain_BNJA}
        rows = torch.arange(len(noisy_B), device=device)
        pair_B2JA = torch.stack([chain_BNJA[rows, noisy_B], chain_BNJA[rows, noisy_B + 1]], dim=1)
        return actions_BJA, {"pair": pair_B2JA, "step": noisy_B}

    def step(self, x_BJA: Tensor, v_BJA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, standard deviation) of the noisy step from x at this time, of what is counted."""
        x_BJA, v_BJA = self._counted(x_BJA), self._counted(v_BJA)
        delta = 1.0 / self.config.num_steps
        if self.spread_JA is not None:
            std_JA = LEAST_STD + (LARGEST_STD - LEAST_STD) * self.spread_JA.sigmoid()
            return x_BJA - delta * v_BJA, std_JA.expand_as(x_BJA)
        t = time_B[:, None, None]
        behind = torch.where(t > 1.0 - 0.5 * delta, torch.full_like(t, delta), 1.0 - t)
        sigma = self.config.eta * (t / behind).sqrt()
        x0_BJA, x1_BJA = x_BJA - t * v_BJA, x_BJA + (1.0 - t) * v_BJA
        mean_BJA = (1.0 - t + delta) * x0_BJA + (t - delta - sigma**2 * delta / (2.0 * t)) * x1_BJA
        return mean_BJA, (sigma * delta**0.5).expand_as(x_BJA)

    def score(self, encoded: Any, latents: Mapping[str, Tensor]) -> Evaluated:
        if self.config.noise == "learned":
            logprobs_BJ, entropies_BJ = self._chain(encoded, latents["chain"])
        else:
            time_B = 1.0 - latents["step"].float() / self.config.num_steps
            logprobs_BJ, entropies_BJ = self._one(
                encoded, latents["pair"][:, 0], latents["pair"][:, 1], time_B
            )
        return Evaluated(logprobs_BJ, entropies_BJ, self.value_of(encoded))

    def values(self, inputs: Inputs) -> Tensor:
        return self.value_of(self.encode(inputs))

    def imitation_loss(self, inputs: Inputs, actions_BJA: Tensor, mask_BJ: Tensor) -> Tensor:
        """Flow matching: (v(x_t, t) − (ε − a))²."""
        wanted_BJA = self.normalised(actions_BJA)
        time_B = torch.rand(len(wanted_BJA), device=wanted_BJA.device)
        noise_BJA = torch.randn(len(wanted_BJA), *self.drawn, device=wanted_BJA.device)
        # Behind the actions that are known the last one is repeated; numbers that the robot has not are 0.
        length, size = self.drawn[0] - self.shape[0], self.drawn[1] - self.shape[1]
        whole_BJA = pad(torch.cat([wanted_BJA, wanted_BJA[:, -1:].expand(-1, length, -1)], dim=1), (0, size))
        t = time_B[:, None, None]
        x_BJA = t * noise_BJA + (1.0 - t) * whole_BJA
        v_BJA = self.velocity(self.encode(inputs), x_BJA, time_B)
        errors_BJ = 0.5 * self._counted(v_BJA - (noise_BJA - whole_BJA)).square().sum(-1)
        return (errors_BJ * mask_BJ).sum()

    # --- inside -------------------------------------------------------------------------------------------

    def _counted(self, drawn_BJA: Tensor) -> Tensor:
        """What of a chunk is executed."""
        return drawn_BJA[..., : self.shape[0], : self.shape[1]]

    def _one(
        self, encoded: Any, x_BJA: Tensor, following_BJA: Tensor, time_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean_BJA, std_BJA = self.step(x_BJA, self.velocity(encoded, x_BJA, time_B), time_B)
        log_std_BJA = std_BJA.log()
        logprobs_BJA = (
            -0.5 * ((self._counted(following_BJA) - mean_BJA) / std_BJA) ** 2 - log_std_BJA - 0.5 * LOG_2PI
        )
        return logprobs_BJA.sum(-1), (log_std_BJA + 0.5 * (1.0 + LOG_2PI)).sum(-1)

    def _chain(self, encoded: Any, chain_BNJA: Tensor) -> tuple[Tensor, Tensor]:
        first_BJA = chain_BNJA[:, 0]
        logprobs_BJ = (-0.5 * self._counted(first_BJA) ** 2 - 0.5 * LOG_2PI).sum(-1)
        entropies_BJ = torch.zeros_like(logprobs_BJ)
        for k in range(self.config.num_steps):
            time_B = torch.full((len(first_BJA),), 1.0 - k / self.config.num_steps, device=first_BJA.device)
            more, entropies_BJ = self._one(encoded, chain_BNJA[:, k], chain_BNJA[:, k + 1], time_B)
            logprobs_BJ = logprobs_BJ + more
        return logprobs_BJ, entropies_BJ
