"""Advantages and losses of policies that act in chunks. Pure functions; called by rill.training.robots.

A chunk c is decided on at once and plays n_c ≤ J actions: fewer where its episode ends inside it. Discounting counts
actions, not chunks, and what was never executed is in no sum.

Axes: C chunk of one episode, B chunk of a batch, J action of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from rill.algorithms.advantages.group_statistics import within_groups
from rill.algorithms.advantages.grpo import standardise
from rill.algorithms.filters import DropReason, Verdict
from rill.algorithms.losses.clip import clip_loss
from rill.algorithms.mismatch import MAX_LOG_RATIO
from rill.config.base import Config
from rill.types import Bits, Floats


class Level(StrEnum):
    """What one probability ratio is over."""

    CHUNK = "chunk"  # Σ_j of the executed actions
    ACTION = "action"  # each executed action by itself


class Estimator(StrEnum):
    GAE = "gae"  # a value head's, discounted
    GROUP = "group"  # against the other episodes from the same initial state


class EmbodiedAlgorithmConfig(Config):
    """[algorithm]"""

    estimator: Estimator = Estimator.GAE
    """"gae": PPO with the policy's value head; "group": GRPO over episodes that begin with the same state."""
    level: Level = Level.CHUNK
    """What a probability ratio is over: a whole chunk, or each of its actions."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount of one action."""
    lam: float = Field(default=0.95, ge=0, le=1)
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, per number of an action. 0: off."""
    value_coefficient: float = Field(default=0.5, ge=0)
    """Weight of the value head's squared error. Used with "gae" only."""
    min_success: float = Field(default=0.0, ge=0, le=1)
    """Groups with a smaller share of successes are dropped. Used with "group" only."""
    max_success: float = Field(default=1.0, ge=0, le=1)
    """Groups with a larger share are dropped."""

    @model_validator(mode="after")
    def _band_is_open(self) -> Self:
        if self.min_success > self.max_success:
            raise ValueError(f"min_success {self.min_success} is above max_success {self.max_success}")
        return self


class Advantage(NamedTuple):
    advantages_C: Floats
    returns_C: Floats


def chunk_gae(
    rewards_CJ: Floats,
    executed_CJ: Bits,
    values_C: Floats,
    final_value: float,
    *,
    terminated: bool,
    gamma: float,
    lam: float,
) -> Advantage:
    """GAE over the chunks of one episode:

    R_c = Σ_{j < n_c} γ^j r_{c,j}
    Δ_c = R_c + γ^{n_c} V_{c+1} − V_c        V behind the last chunk: 0 if terminated, V(final observation) if truncated
    A_c = Δ_c + γ^{n_c} λ A_{c+1}
    """
    num_chunks, length = rewards_CJ.shape
    powers_J = gamma ** np.arange(length)
    rewards_C = (rewards_CJ * executed_CJ * powers_J).sum(1)
    discounts_C = gamma ** executed_CJ.sum(1)
    following, advantage = (0.0 if terminated else final_value), 0.0
    advantages_C = np.zeros(num_chunks, np.float32)
    for c in reversed(range(num_chunks)):
        delta = rewards_C[c] + discounts_C[c] * following - values_C[c]
        advantage = delta + discounts_C[c] * lam * advantage
        advantages_C[c], following = advantage, values_C[c]
    return Advantage(advantages_C, (advantages_C + values_C).astype(np.float32))


def group_advantages(rewards_N: Sequence[float], group_ids_N: Sequence[str], eps: float = 1e-6) -> Floats:
    """GRPO's, over the episodes of one group id, in whatever order they stand."""
    rewards = np.asarray(rewards_N, np.float64)
    found = within_groups(rewards, np.asarray(group_ids_N), partial(standardise, epsilon=eps))
    return found.astype(np.float32)


def judge(config: EmbodiedAlgorithmConfig, successes: Sequence[bool]) -> Verdict:
    """Whether the episodes from one initial state are worth training on; failed ones are left out by the caller."""
    if not successes:
        return Verdict(DropReason.FAILED)
    if config.estimator is Estimator.GAE:
        return Verdict()
    if len(successes) < 2:
        return Verdict(DropReason.FAILED)
    share = sum(successes) / len(successes)
    if share < config.min_success:
        return Verdict(DropReason.TOO_HARD)
    if share > config.max_success:
        return Verdict(DropReason.TOO_EASY)
    return Verdict()


class Loss(NamedTuple):
    """Sums, to be divided by the counts of the whole batch: chunks in any number give the same gradient."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    clipped: Tensor
    kl: Tensor
    """Σ (r − 1 − log r): an estimate of the divergence from the policy that acted."""


def count_of(level: Level, executed_BJ: Tensor) -> Tensor:
    """Ratios that a loss is the mean of."""
    return executed_BJ.any(1).sum() if level is Level.CHUNK else executed_BJ.sum()


def ppo_loss(
    config: EmbodiedAlgorithmConfig,
    *,
    logprobs_BJ: Tensor,
    old_logprobs_BJ: Tensor,
    executed_BJ: Tensor,
    advantages_B: Tensor,
    entropies_BJ: Tensor,
    values_B: Tensor,
    returns_B: Tensor,
) -> Loss:
    """−Σ min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r over a chunk or an action; masked where nothing was executed."""
    mask_BJ = executed_BJ.float()
    change_BJ = (logprobs_BJ - old_logprobs_BJ) * mask_BJ
    if config.level is Level.CHUNK:
        change, weight, advantage = change_BJ.sum(1), executed_BJ.any(1).float(), advantages_B
    else:
        change, weight, advantage = change_BJ, mask_BJ, advantages_B[:, None].expand_as(change_BJ)
    change = change.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = change.exp()
    policy, _ = clip_loss(ratio, advantage, clip_low=config.clip_low, clip_high=config.clip_high)
    is_outside = (ratio < 1.0 - config.clip_low) | (ratio > 1.0 + config.clip_high)
    weight_B = executed_BJ.any(1).float()
    return Loss(
        policy=(policy * weight).sum(),
        value=(0.5 * (values_B - returns_B) ** 2 * weight_B).sum(),
        entropy=(entropies_BJ * mask_BJ).sum(),
        clipped=(is_outside.float() * weight).sum().detach(),
        kl=((ratio - 1.0 - change) * weight).sum().detach(),
    )


def explained_variance(values_B: Floats, returns_B: Floats) -> float:
    """1 − Var(return − value) / Var(return): 1 is a perfect critic, 0 no better than the mean."""
    spread = float(np.var(returns_B))
    return 0.0 if spread < 1e-12 else 1.0 - float(np.var(returns_B - values_B)) / spread
