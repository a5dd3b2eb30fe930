"""Action tokens: every number of an action is one of `bins` tokens, all of a chunk decided in one pass (OpenVLA-OFT).

    log π(a_j | o) = Σ_i log softmax(logits[j, i] / temperature)[token[j, i]]

Two bodies. `mlp`: state, words and image features through an MLP. `transformer`: [state, words, patches, J·A
placeholders] through layers that all see each other (bidirectional: with causal attention such a policy loses most of
its success), logits at the placeholders, value at the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rill.policies.base import Evaluated, Policy, PolicyConfig
from rill.policies.draws import Draws
from rill.policies.inputs import MAX_WORDS, NUM_WORDS, Inputs
from rill.policies.trunk import Trunk, linear
from rill.types import RobotSpec

PATCH = 8
"""Pixels of a patch's side."""


class TokenConfig(PolicyConfig):
    """What every policy of tokens has."""

    temperature: float = Field(default=1.0, gt=0)
    """Of sampling and of the log-probabilities alike."""
    smoothing: float = Field(default=1.0, ge=0)
    """Spread, in bins, of what imitation is taught: keeps exploration alive. 0: the expert's bin alone."""


class TokenPolicy(Policy):
    class Config(TokenConfig):
        type: Literal["tokens"] = "tokens"
        body: Literal["mlp", "transformer"] = "mlp"
        bins: int = Field(default=33, ge=2)
        """Tokens of one number: equal parts of −1 … 1."""
        width: int = Field(default=128, ge=8)
        depth: int = Field(default=2, ge=1)
        heads: int = Field(default=4, ge=1)
        """Of attention, where the body is a transformer."""

    config: TokenConfig
    centres_K: Tensor

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        super().__init__()
        self.build(config, spec, config.bins, config.bins)
        self.body = MLPBody(config, spec) if config.body == "mlp" else TransformerBody(config, spec)

    def build(self, config: TokenConfig, spec: RobotSpec, num_tokens: int, num_bins: int) -> None:
        """What all of them hold. Tokens that there are more of than bins mean the last bin."""
        self.config, self.spec, self.num_bins = config, spec, num_bins
        bins_K = torch.arange(num_tokens).clamp(max=num_bins - 1)
        self.register_buffer("centres_K", -1.0 + (2.0 * bins_K + 1.0) / num_bins, persistent=False)

    def encode(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(logits [B, J, A, K] as they are drawn from, values [B])."""
        logits_BJAK, values_B = self.body(inputs)
        return logits_BJAK.float() / self.config.temperature, values_B.float()

    def decide(
        self, encoded: tuple[Tensor, Tensor], draws: Draws, *, greedy: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits_BJAK, _ = encoded
        if greedy:
            tokens_BJA = logits_BJAK.argmax(-1)
        else:
            cumulative_BJAK = logits_BJAK.softmax(-1).cumsum(-1)
            wanted_BJA1 = draws.uniform(*logits_BJAK.shape[1:-1])[..., None] * cumulative_BJAK[..., -1:]
            tokens_BJA = (cumulative_BJAK < wanted_BJA1).sum(-1).clamp(max=logits_BJAK.shape[-1] - 1)
        actions_BJA = self.centres_K[tokens_BJA]
        return self.denormalised(actions_BJA), {"tokens": tokens_BJA.to(torch.int16)}

    def score(self, encoded: tuple[Tensor, Tensor], latents: Mapping[str, Tensor]) -> Evaluated:
        logits_BJAK, values_B = encoded
        logprobs_BJAK = logits_BJAK.log_softmax(-1)
        chosen_BJA = logprobs_BJAK.gather(-1, latents["tokens"].long()[..., None]).squeeze(-1)
        entropies_BJA = -(logprobs_BJAK.exp() * logprobs_BJAK).sum(-1)
        return Evaluated(chosen_BJA.sum(-1), entropies_BJA.sum(-1), values_B)

    def values(self, inputs: Inputs) -> Tensor:
        return self.encode(inputs)[1]

    def imitation_loss(self, inputs: Inputs, actions_BJA: Tensor, mask_BJ: Tensor) -> Tensor:
        logits_BJAK, _ = self.encode(inputs)
        places_BJA = (self.normalised(actions_BJA) + 1.0) / 2.0 * self.num_bins - 0.5
        bins_K = torch.arange(logits_BJAK.shape[-1], device=places_BJA.device)
        distances_BJAK = (bins_K - places_BJA[..., None]) / max(self.config.smoothing, 0.1)
        targets_BJAK = (-0.5 * distances_BJAK**2).softmax(-1)
        losses_BJ = -(targets_BJAK * logits_BJAK.log_softmax(-1)).sum((-1, -2))
        return (losses_BJ * mask_BJ).sum()


class MLPBody(nn.Module):
    """Inputs → (logits [B, J, A, bins], values [B])."""

    def __init__(self, config: TokenPolicy.Config, spec: RobotSpec) -> None:
        super().__init__()
        self.shape = (config.chunk, spec.action_size, config.bins)
        self.trunk = Trunk(spec, config.width, config.depth, word_size=16)
        self.critic = Trunk(spec, config.width, config.depth, word_size=16)
        self.logits = linear(config.width, config.chunk * spec.action_size * config.bins, 0.01)
        self.value = linear(config.width, 1, 1.0)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        logits_BJAK = self.logits(self.trunk(inputs)).unflatten(-1, self.shape)
        return logits_BJAK, self.value(self.critic(inputs)).squeeze(-1)


class TransformerBody(nn.Module):
    """The same."""

    def __init__(self, config: TokenPolicy.Config, spec: RobotSpec) -> None:
        super().__init__()
        width = config.width
        self.shape = (config.chunk, spec.action_size)
        self.trunk = Trunk(spec_without_cameras(spec), width, 1, word_size=16)
        self.words = nn.Embedding(NUM_WORDS, width, padding_idx=0)
        self.patches = nn.ModuleDict({name: nn.Conv2d(3, width, PATCH, PATCH) for name in spec.cameras})
        num_patches = (spec.image_size // PATCH) ** 2 * len(spec.cameras)
        num_slots = config.chunk * spec.action_size
        self.places_L = nn.Parameter(0.02 * torch.randn(1 + MAX_WORDS + num_patches + num_slots, width))
        layer = nn.TransformerEncoderLayer(
            width, config.heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.depth, enable_nested_tensor=False)
        self.num_slots = num_slots
        self.logits = linear(width, config.bins, 0.01)
        self.value = nn.Sequential(linear(width, width, 2**0.5), nn.Tanh(), linear(width, 1, 1.0))

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        parts = [self.trunk(inputs)[:, None], self.words(inputs.words_BW)]
        for camera, cut in self.patches.items():
            pixels = inputs.images[camera].permute(0, 3, 1, 2).float() / 127.5 - 1.0
            parts.append(cut(pixels).flatten(2).transpose(1, 2))
        seen = torch.cat(parts, dim=1)
        slots = seen.new_zeros(len(seen), self.num_slots, seen.shape[-1])
        hidden_BLD = self.layers(torch.cat([seen, slots], dim=1) + self.places_L)[:, -self.num_slots :]
        logits_BJAK = self.logits(hidden_BLD).unflatten(1, self.shape)
        return logits_BJAK, self.value(hidden_BLD[:, 0]).squeeze(-1)


def spec_without_cameras(spec: RobotSpec) -> RobotSpec:
    return RobotSpec(state_size=spec.state_size, action_size=spec.action_size, tasks=spec.tasks)
