"""The trainer of a robot's policy: episodes in, optimizer steps out; imitation before the first of them.

Callers: rill.workers.robots.actor. Every data rank holds the whole policy and its share of the episodes; gradients
are summed over the ranks and divided once by what was counted on all of them. Log-probabilities of the acting policy
and values are computed here, before the first step, in the blocks that the rollout computes in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.embodied import (
    EmbodiedAlgorithmConfig,
    Estimator,
    Loss,
    chunk_gae,
    count_of,
    explained_variance,
    group_advantages,
    ppo_loss,
)
from rill.algorithms.whitening import whiten
from rill.config import PartConfig
from rill.errors import CheckpointError, InvalidSampleError, TrainingError, WeightSyncError
from rill.policies.base import Evaluated, Policy
from rill.policies.inputs import Inputs
from rill.registry import Registry
from rill.telemetry.run import write_atomically
from rill.training.balance import CostModel
from rill.training.offload import Shelf
from rill.training.parallel import Rendezvous, World, copy_weights
from rill.types import EmbodiedTrajectory, Floats, Observation, Observations

ROBOT_TRAINERS = Registry(
    "robot trainer", {"ppo": "rill.training.robots:RobotTrainer", "sac": "rill.training.sac:SACTrainer"}
)
STATE_FILE, COUNTS_FILE = "trainer.pt", "trainer.json"
EVALUATED_ROWS = 4096
"""Chunks that are on the device at once while old log-probabilities are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One chunk of an expert's: what it saw and did. mask_J: which actions it had time for."""

    inputs: Inputs
    actions_BJA: Tensor
    mask_BJ: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The chunks of a batch of episodes, as columns."""

    inputs: Inputs
    latents: dict[str, Tensor]
    executed_BJ: Tensor
    old: Evaluated
    advantages_B: Tensor
    returns_B: Tensor

    def __len__(self) -> int:
        return len(self.executed_BJ)


class RobotTrainer:
    rests_on_host = False

    class Config(PartConfig):
        """[trainer]"""

        type: Literal["ppo"] = "ppo"
        learning_rate: float = Field(default=3e-4, gt=0)
        num_epochs: int = Field(default=4, ge=1)
        """Passes over a batch."""
        num_mini_batches: int = Field(default=4, ge=1)
        """Optimizer steps of a pass."""
        max_grad_norm: float = Field(default=1.0, gt=0)
        target_kl: float = Field(default=0.0, ge=0)
        """Passes end once the policy has moved this far from the one that acted, in nats per ratio. 0: off."""
        weight_decay: float = Field(default=0.0, ge=0)

    def __init__(
        self,
        config: RobotTrainer.Config,
        algorithm: EmbodiedAlgorithmConfig,
        policy: Policy,
        *,
        rendezvous: Rendezvous | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.world = World.join(rendezvous, torch.device(device))
        self.device = torch.device(device)
        torch.manual_seed(seed)  # what a flow is taught with
        self.policy = policy.to(self.device)
        self.optimizer = torch.optim.Adam(
            [p for p in policy.parameters() if p.requires_grad],
            lr=config.learning_rate,
            eps=1e-5,
            weight_decay=config.weight_decay,
        )
        self.cost_model = CostModel()
        self._shelf = Shelf()
        self._seed = seed
        self._num_steps = 0

    # --- learning -----------------------------------------------------------------------------------------

    def update(self, episodes: Sequence[EmbodiedTrajectory]) -> dict[str, float]:
        """All passes over one batch; `episodes` are this rank's share, whole groups where groups matter."""
        rows, metrics = self._rows(episodes)
        rng = np.random.default_rng([self._seed, self._num_steps, self.world.data_rank])
        sums = torch.zeros(5, dtype=torch.float64)
        num_updates, norms, kl = 0, [], 0.0
        for _ in range(self.config.num_epochs):
            order = rng.permutation(len(rows))
            passed = torch.zeros(2, dtype=torch.float64)
            for part in np.array_split(order, self.config.num_mini_batches):
                made = self._step(rows, torch.from_numpy(part))
                if made is None:
                    continue
                losses, norm = made
                sums += losses
                passed += losses[[4, 0]]
                norms.append(norm)
                num_updates += 1
            kl = float(passed[0] / max(1.0, float(passed[1])))
            if self.config.target_kl and kl > self.config.target_kl:
                break
        self._num_steps += 1
        _, value, entropy, clipped, _ = (sums / max(1.0, float(sums[0]))).tolist()
        return metrics | {
            "policy/clipped": clipped,
            "policy/entropy": entropy,
            "policy/kl": kl,
            "policy/updates": float(num_updates),
            "value/loss": value,
            "grad_norm": float(np.mean(norms)),
        }

    def imitate(
        self, shown: Demonstration, num_steps: int, batch_size: int, learning_rate: float
    ) -> dict[str, float]:
        """Supervised steps on an expert's chunks: every rank takes its own rows of the same batch."""
        rng = np.random.default_rng([self._seed, 1, self._num_steps])
        self._num_steps += 1
        loss, norm = 0.0, 0.0
        self._set_rate(learning_rate)
        for _ in range(num_steps):
            chosen = torch.from_numpy(rng.integers(0, len(shown.inputs), batch_size))
            mine = chosen[self.world.data_rank :: self.world.data_size]
            inputs, actions = shown.inputs.rows(mine).to(self.device), shown.actions_BJA[mine].to(self.device)
            mask_BJ = shown.mask_BJ[mine].to(self.device).float()
            total = self.policy.imitation_loss(inputs, actions, mask_BJ)
            total.backward()  # type: ignore[no-untyped-call]
            count = self._over_ranks(mask_BJ.sum())
            norm = self._apply(count)
            loss = float(self._over_ranks(total.detach()) / count)
        self._set_rate(self.config.learning_rate)
        return {"bc/loss": loss, "grad_norm": norm}

    def end_imitation(self) -> None:
        """RL begins with an optimizer that has seen nothing."""
        self.optimizer.state.clear()

    # --- files --------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        if self.world.rank:
            return
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"policy": self.policy.trained(), "optimizer": self.optimizer.state_dict()}, place / STATE_FILE
        )
        write_atomically(place / COUNTS_FILE, json.dumps({"steps": self._num_steps}))

    def wait_saved(self, timeout_s: float) -> None:
        """It is when `save` returns."""

    def load(self, folder: str) -> None:
        place = Path(folder)
        try:
            state = torch.load(place / STATE_FILE, map_location=self.device, weights_only=True)
            self._num_steps = int(json.loads((place / COUNTS_FILE).read_text(encoding="utf-8"))["steps"])
            copy_weights(self.policy.trained(), state["policy"].items())
            self.optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, ValueError, KeyError, WeightSyncError) as error:
            raise CheckpointError(f"{place} cannot be read: {error}") from error

    def onload(self) -> None:
        self._shelf.take_all()

    def offload(self) -> None:
        if self.device.type != "cpu":
            states = (value for state in self.optimizer.state.values() for value in state.values())
            held = [value for value in states if isinstance(value, Tensor)]
            self._shelf.put([*self.policy.parameters(), *self.policy.buffers(), *held])
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.world.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _rows(self, episodes: Sequence[EmbodiedTrajectory]) -> tuple[Rows, dict[str, float]]:
        if any(episode.error is not None for episode in episodes):
            raise InvalidSampleError("a failed episode is counted and never trained on")
        if not episodes:
            raise TrainingError(
                f"data rank {self.world.data_rank} got no episode of the batch: use more prompts per step than ranks"
            )
        inputs = self.policy.seen(Observations.joined([e.observations for e in episodes]))
        names = episodes[0].latents
        latents = {n: torch.from_numpy(np.concatenate([e.latents[n] for e in episodes])) for n in names}
        executed_BJ = torch.from_numpy(np.concatenate([e.executed_CJ for e in episodes]))
        old = self._old(inputs, latents)
        values_B = old.values_B.numpy()
        advantages_B, returns_B = self._advantages(episodes, values_B)
        told_BJ = torch.from_numpy(np.concatenate([e.logprobs_CJ for e in episodes]))
        gap_BJ = ((told_BJ - old.logprobs_BJ).abs() * executed_BJ).sum()
        counts = self._over_ranks(
            torch.tensor([float(gap_BJ), float(executed_BJ.sum())], dtype=torch.float64)
        )
        metrics = {"mismatch/abs_mean": float(counts[0] / counts[1])}
        if self.algorithm.estimator is Estimator.GAE:
            metrics["value/explained_variance"] = explained_variance(values_B, returns_B)
        rows = Rows(
            inputs=inputs,
            latents=latents,
            executed_BJ=executed_BJ,
            old=old,
            advantages_B=self._whitened(torch.from_numpy(advantages_B)),
            returns_B=torch.from_numpy(returns_B),
        )
        return rows, metrics

    def _old(self, inputs: Inputs, latents: dict[str, Tensor]) -> Evaluated:
        parts = []
        for first in range(0, len(inputs), EVALUATED_ROWS):
            rows = slice(first, first + EVALUATED_ROWS)
            block = {name: tensor[rows].to(self.device) for name, tensor in latents.items()}
            parts.append(self.policy.evaluate_as_drawn(inputs.rows(rows).to(self.device), block))
        return Evaluated(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))

    def _advantages(self, episodes: Sequence[EmbodiedTrajectory], values_B: Floats) -> tuple[Floats, Floats]:
        if self.algorithm.estimator is Estimator.GROUP:
            advantages_N = group_advantages([e.reward for e in episodes], [e.group_id for e in episodes])
            repeated = np.repeat(advantages_N, [e.num_chunks for e in episodes])
            return repeated, values_B
        final_N = self._values([episode.final for episode in episodes])
        found, first = [], 0
        for episode, final in zip(episodes, final_N, strict=True):
            values_C = values_B[first : first + episode.num_chunks]
            first += episode.num_chunks
            found.append(
                chunk_gae(
                    episode.rewards_CJ,
                    episode.executed_CJ,
                    values_C,
                    float(final),
                    terminated=episode.terminated,
                    gamma=self.algorithm.gamma,
                    lam=self.algorithm.lam,
                )
            )
        return np.concatenate([f.advantages_C for f in found]), np.concatenate([f.returns_C for f in found])

    def _values(self, observations: Sequence[Observation]) -> Floats:
        """Of what was seen last."""
        inputs = self.policy.seen(observations)
        values: Floats = self.policy.values_as_drawn(inputs.to(self.device)).cpu().numpy()
        return values

    def _whitened(self, advantages_B: Tensor) -> Tensor:
        """Over all ranks; a group's advantages are so already, and stay."""
        if self.algorithm.estimator is Estimator.GROUP:
            return advantages_B
        return whiten(advantages_B, torch.ones_like(advantages_B), self._over_ranks)

    def _step(self, rows: Rows, chosen: Tensor) -> tuple[Tensor, float] | None:
        """One optimizer step; (count, value, entropy, clipped, kl) summed over all ranks, and the gradient's norm; None
        where there are fewer rows than mini-batches, and no rank has any of this one."""
        executed_BJ = rows.executed_BJ[chosen].to(self.device)
        num_actions, ratios = executed_BJ.sum(), count_of(self.algorithm.level, executed_BJ)
        counts = self._over_ranks(torch.stack([ratios, executed_BJ.any(1).sum(), num_actions]).double().cpu())
        num_ratios, num_chunks, num_actions_all = counts.tolist()
        if not num_ratios:
            return None
        inputs = rows.inputs.rows(chosen).to(self.device)
        latents = {name: tensor[chosen].to(self.device) for name, tensor in rows.latents.items()}
        now = self.policy.evaluate(inputs, latents)
        loss: Loss = ppo_loss(
            self.algorithm,
            logprobs_BJ=now.logprobs_BJ,
            old_logprobs_BJ=rows.old.logprobs_BJ[chosen].to(self.device),
            executed_BJ=executed_BJ,
            advantages_B=rows.advantages_B[chosen].to(self.device),
            entropies_BJ=now.entropies_BJ,
            values_B=now.values_B,
            returns_B=rows.returns_B[chosen].to(self.device),
        )
        size = self.policy.spec.action_size
        total = loss.policy - self.algorithm.entropy * loss.entropy / size * (num_ratios / num_actions_all)
        if self.algorithm.estimator is Estimator.GAE:
            total = total + self.algorithm.value_coefficient * loss.value * (num_ratios / num_chunks)
        total.backward()
        norm = self._apply(counts[0])
        scale = float(num_ratios / num_chunks), float(num_ratios / num_actions_all / size)
        told = torch.stack(
            [
                ratios.double().cpu(),
                loss.value.detach().double().cpu() * scale[0],
                loss.entropy.detach().double().cpu() * scale[1],
                loss.clipped.double().cpu(),
                loss.kl.double().cpu(),
            ]
        )
        return self._over_ranks(told), norm

    def _apply(self, count: Tensor) -> float:
        """Divide the summed gradients, clip, step; the norm before clipping. One that is not finite changes nothing."""
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(self._over_ranks(parameter.grad) / float(count))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        if np.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _over_ranks(self, values: Tensor) -> Tensor:
        return values if self.world.size == 1 else self.world.sum_over_data(values)

    def _set_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
