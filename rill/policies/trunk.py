"""What small policies see with: state, words and images as one vector, by an MLP and a small CNN."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rill.policies.inputs import NUM_WORDS, Inputs
from rill.types import RobotSpec

NUM_IMAGE_FEATURES = 64
LARGE = 1024


class Trunk(nn.Module):
    """Inputs → [B, width]."""

    def __init__(self, spec: RobotSpec, width: int, depth: int, word_size: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(NUM_WORDS, word_size, mode="mean", padding_idx=0)
        self.eyes = nn.ModuleDict({camera: eye() for camera in spec.cameras})
        size = spec.state_size + word_size + NUM_IMAGE_FEATURES * len(spec.cameras)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [linear(size, width, 2**0.5), nn.Tanh()]
            size = width
        self.layers = nn.Sequential(*layers)
        self.register_buffer("mean_S", torch.zeros(spec.state_size))
        self.register_buffer("spread_S", torch.ones(spec.state_size))

    def forward(self, inputs: Inputs) -> Tensor:
        parts = [self.normalised(inputs.states_BS), self.words(inputs.words_BW)]
        for camera, look in self.eyes.items():
            parts.append(look(inputs.images[camera].permute(0, 3, 1, 2).float() / 127.5 - 1.0))
        seen: Tensor = self.layers(torch.cat(parts, dim=1))
        return seen

    def normalised(self, states_BS: Tensor) -> Tensor:
        scaled: Tensor = (states_BS - self.mean_S) / self.spread_S  # type: ignore[operator]
        return scaled.clamp(-10.0, 10.0)

    def set_normaliser(self, states_NS: Tensor) -> None:
        mean_S, spread_S = mean_and_spread(states_NS)
        self.mean_S.copy_(mean_S)  # type: ignore[operator]
        self.spread_S.copy_(spread_S)  # type: ignore[operator]


def mean_and_spread(rows_NX: Tensor) -> tuple[Tensor, Tensor]:
    """What numbers are scaled by. One that never changed says nothing yet: it keeps its own scale."""
    spread_X = rows_NX.std(0) if len(rows_NX) > 1 else torch.zeros_like(rows_NX[0])
    return rows_NX.mean(0), torch.where(spread_X < 1e-4, 1.0, spread_X)


def eye() -> nn.Module:
    """A camera of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, NUM_IMAGE_FEATURES),
        nn.Tanh(),
    )


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Orthogonal, as PPO on small networks wants. A large random one nearly is, and its decomposition takes minutes."""
    layer = nn.Linear(inputs, outputs)
    if min(inputs, outputs) <= LARGE:
        nn.init.orthogonal_(layer.weight, gain)
    else:
        nn.init.normal_(layer.weight, std=gain / max(inputs, outputs) ** 0.5)
    nn.init.zeros_(layer.bias)
    return layer
