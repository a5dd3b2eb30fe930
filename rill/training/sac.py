"""Soft actor-critic: learns from a replay buffer of everything that was played, for policies over states.

    y = r + γ (1 − terminated) (min_i Q̄_i(o', a') − α log π(a' | o')),  a' ~ π
    Q_i ← (Q_i(o, a) − y)²,   π ← α log π(a | o) − min_i Q_i(o, a),   α ← −α (log π + target entropy)

Called as RobotTrainer is: a batch of episodes in, optimizer steps out; here the batch goes into the buffer first, and a
fixed number of updates is made for every action that is new. A truncated episode goes on as far as its value is
concerned: only `terminated` ends it. One rank; chunks of one action.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rill.errors import CheckpointError, ConfigError, InvalidSampleError
from rill.policies.inputs import Inputs, read
from rill.policies.squashed import SquashedPolicy
from rill.policies.trunk import Trunk, linear
from rill.training.robots import RobotTrainer
from rill.types import EmbodiedTrajectory, Floats, Observations, RobotSpec

SAC_FILE = "sac.pt"


class Critics(nn.Module):
    """Two of them: the smaller is believed."""

    def __init__(self, spec: RobotSpec, width: int) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(Trunk(spec, width, 1, word_size=16) for _ in range(2))
        self.heads = nn.ModuleList(
            nn.Sequential(linear(width + spec.action_size, width, 2**0.5), nn.ReLU(), linear(width, 1, 1.0))
            for _ in range(2)
        )

    def forward(self, inputs: Inputs, actions_BA: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (
            head(torch.cat([trunk(inputs), actions_BA], dim=1)).squeeze(-1)
            for trunk, head in zip(self.trunks, self.heads, strict=True)
        )
        return first, second


class ReplayBuffer:
    """The newest transitions, as columns; the oldest are overwritten."""

    def __init__(self, capacity: int, spec: RobotSpec, num_words: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.next = 0
        """Where the next one goes."""
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "states": ((spec.state_size,), np.float32),
            "next_states": ((spec.state_size,), np.float32),
            "words": ((num_words,), np.int64),
            "actions": ((spec.action_size,), np.float32),
            "rewards": ((), np.float32),
            "ends": ((), np.float32),
        }
        self.columns = {name: np.zeros((capacity, *shape), kind) for name, (shape, kind) in shapes.items()}

    def add(self, rows: dict[str, Any]) -> int:
        """How many there were."""
        count = len(rows["rewards"])
        places = (self.next + np.arange(count)) % self.capacity
        for name, column in self.columns.items():
            column[places] = rows[name]
        self.next = int((self.next + count) % self.capacity)
        self.size = min(self.capacity, self.size + count)
        return count

    def restore(self, rows: dict[str, Any], following: int) -> None:
        """What another one held, whose next row would have gone to `following`: where it stood, for draws go by that,
        or the newest of it where this one is smaller."""
        if len(rows["rewards"]) == self.capacity:
            self.next = following
        self.add({name: np.roll(column, -following, axis=0) for name, column in rows.items()})

    def draw(self, rng: np.random.Generator, count: int, device: torch.device) -> dict[str, Tensor]:
        places = rng.integers(0, self.size, count)
        return {name: torch.from_numpy(column[places]).to(device) for name, column in self.columns.items()}


class SACTrainer(RobotTrainer):
    class Config(RobotTrainer.Config):
        type: Literal["sac"] = "sac"  # type: ignore[assignment]
        capacity: int = Field(default=200_000, ge=1)
        """Transitions that are kept."""
        batch_size: int = Field(default=256, ge=1)
        updates_per_action: float = Field(default=0.25, gt=0)
        """Optimizer steps for every action that was played."""
        warm_up: int = Field(default=1000, ge=0)
        """Transitions before the first update."""
        tau: float = Field(default=0.005, gt=0, le=1)
        """How fast the target critics follow."""
        initial_alpha: float = Field(default=0.1, gt=0)
        """Weight of the entropy at the start; it is learned."""

        @model_validator(mode="after")
        def _gets_warm(self) -> Self:
            if self.warm_up > self.capacity:
                raise ValueError(
                    f"warm_up {self.warm_up} is above capacity {self.capacity}: nothing would be learned"
                )
            return self

    config: Config
    policy: SquashedPolicy

    def __init__(self, config: Config, algorithm: Any, policy: Any, **how: Any) -> None:
        if not isinstance(policy, SquashedPolicy) or policy.config.chunk != 1 or policy.spec.cameras:
            raise ConfigError(
                "trainer.type = 'sac' learns policies over states, action by action: set policy.type = 'squashed', "
                "policy.chunk = 1 and simulator.image_size = 0"
            )
        super().__init__(config, algorithm, policy, **how)
        if self.world.size > 1:
            raise ConfigError("trainer.type = 'sac' trains on one rank: give placement.actor one device")
        self.critics = Critics(policy.spec, policy.config.width).to(self.device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.tensor(math.log(config.initial_alpha), device=self.device, requires_grad=True)
        self.critic_optimizer = torch.optim.Adam(
            [*self.critics.parameters(), self.log_alpha], config.learning_rate
        )
        self.buffer: ReplayBuffer | None = None

    def update(self, episodes: Sequence[EmbodiedTrajectory]) -> dict[str, float]:
        if any(episode.error is not None for episode in episodes):
            raise InvalidSampleError("a failed episode is counted and never trained on")
        rows = transitions(episodes, self.policy.spec)
        if self.buffer is None:
            self.buffer = ReplayBuffer(self.config.capacity, self.policy.spec, rows["words"].shape[1])
        count = self.buffer.add(rows)
        rng = np.random.default_rng([self._seed, self._num_steps])
        self._num_steps += 1
        metrics = {"replay/size": float(self.buffer.size)}
        if self.buffer.size < self.config.warm_up:
            return metrics
        num_updates = max(1, round(count * self.config.updates_per_action))
        told = [
            self._update(self.buffer.draw(rng, self.config.batch_size, self.device))
            for _ in range(num_updates)
        ]
        means = np.mean(told, axis=0)
        names = ("value/loss", "value/mean", "policy/entropy", "policy/alpha", "grad_norm")
        return metrics | {
            "policy/updates": float(num_updates),
            **dict(zip(names, means.tolist(), strict=True)),
        }

    def save(self, folder: str) -> None:
        super().save(folder)
        buffer = self.buffer
        torch.save(
            {
                "critics": self.critics.state_dict(),
                "targets": self.targets.state_dict(),
                "log_alpha": self.log_alpha.detach(),
                "optimizer": self.critic_optimizer.state_dict(),
                "replay": None
                if buffer is None
                else {n: torch.from_numpy(c[: buffer.size].copy()) for n, c in buffer.columns.items()},
                "replay_next": 0 if buffer is None else buffer.next,
            },
            Path(folder) / SAC_FILE,
        )

    def load(self, folder: str) -> None:
        super().load(folder)
        try:
            state = torch.load(Path(folder) / SAC_FILE, map_location=self.device, weights_only=True)
            self.critics.load_state_dict(state["critics"])
            self.targets.load_state_dict(state["targets"])
            self.critic_optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        if state["replay"] is not None:
            rows = {name: column.cpu().numpy() for name, column in state["replay"].items()}
            self.buffer = ReplayBuffer(self.config.capacity, self.policy.spec, rows["words"].shape[1])
            self.buffer.restore(rows, state.get("replay_next", 0))  # an older rill did not write it

    def _update(self, rows: dict[str, Tensor]) -> tuple[float, ...]:
        now = Inputs(states_BS=rows["states"], words_BW=rows["words"], images={})
        after = Inputs(states_BS=rows["next_states"], words_BW=rows["words"], images={})
        alpha = self.log_alpha.exp()
        with torch.no_grad():
            next_BJA, next_logprobs_B = self.policy.draw(after)
            following_B = torch.minimum(*self.targets(after, next_BJA[:, 0])) - alpha * next_logprobs_B
            wanted_B = rows["rewards"] + self.algorithm.gamma * (1.0 - rows["ends"]) * following_B
        first_B, second_B = self.critics(now, rows["actions"])
        critic_loss = 0.5 * ((first_B - wanted_B) ** 2 + (second_B - wanted_B) ** 2).mean()
        actions_BJA, logprobs_B = self.policy.draw(now)
        target_entropy = -float(self.policy.spec.action_size)
        alpha_loss = -(self.log_alpha * (logprobs_B.detach() + target_entropy)).mean()
        self.critic_optimizer.zero_grad()
        (critic_loss + alpha_loss).backward()
        critic_norm = float(
            nn.utils.get_total_norm(p.grad for p in self.critics.parameters() if p.grad is not None)
        )
        if math.isfinite(critic_norm):
            self.critic_optimizer.step()
        policy_loss = (
            alpha.detach() * logprobs_B - torch.minimum(*self.critics(now, actions_BJA[:, 0]))
        ).mean()
        policy_loss.backward()  # type: ignore[no-untyped-call]
        norm = self._apply(torch.ones(()))
        with torch.no_grad():
            for target, source in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(source, self.config.tau)
        entropy = -logprobs_B.detach().mean() / self.policy.spec.action_size
        told = (critic_loss.detach(), first_B.detach().mean(), entropy, alpha.detach())
        return (*(float(each) for each in told), norm if math.isfinite(critic_norm) else critic_norm)


def transitions(episodes: Sequence[EmbodiedTrajectory], spec: RobotSpec) -> dict[str, Any]:
    """(o, a, r, o', end) of every executed action. `end`: terminated; a truncated episode would have gone on."""
    before = read(Observations.joined([e.observations for e in episodes]), spec)
    following = [seen for e in episodes for seen in (e.observations[1:], Observations.of([e.final]))]
    after = read(Observations.joined(following), spec)
    ends: list[Floats] = []
    for episode in episodes:
        end = np.zeros(episode.num_chunks, np.float32)
        end[-1] = float(episode.terminated)
        ends.append(end)
    return {
        "states": before.states_BS.numpy(),
        "next_states": after.states_BS.numpy(),
        "words": before.words_BW.numpy(),
        "actions": np.concatenate([e.actions_CJA[:, 0] for e in episodes]),
        "rewards": np.concatenate([e.rewards_CJ[:, 0] for e in episodes]),
        "ends": np.concatenate(ends),
    }
