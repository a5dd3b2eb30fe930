"""Which groups are worth training on, and what an over-long answer costs. Pure functions of trajectories.

Called where groups are collected, before advantages. A dropped group is counted under its reason and replaced
by another (dynamic sampling); nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from rill.config.base import Config
from rill.errors import InvalidSampleError
from rill.types import Trajectory


class DropReason(StrEnum):
    EMPTY = "empty"  # no sample survived
    FAILED = "failed"  # too few samples could be scored for a comparison
    NOT_FINITE = "not_finite"  # a reward is NaN or infinite
    EQUAL_REWARDS = "equal_rewards"  # every advantage would be 0
    TOO_HARD = "too_hard"  # mean reward below the band
    TOO_EASY = "too_easy"  # mean reward above the band


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: DropReason | None = None
    """Why the group is not kept; None: it is."""

    @property
    def keep(self) -> bool:
        return self.reason is None


class OverlongConfig(Config):
    """DAPO's soft punishment of over-long answers (arXiv 2503.14476 §3.4). An episode of several samples is punished
    for the longest."""

    limit_tokens: int = Field(gt=0)
    """L_max: the length at which the full penalty applies."""
    buffer_tokens: int = Field(gt=0)
    """L_cache: the penalty grows over this many tokens before the limit."""
    penalty: float = Field(1.0, ge=0)
    """Taken from the reward at the limit and beyond."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongConfig:
        if self.buffer_tokens > self.limit_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} is more than limit_tokens {self.limit_tokens}"
            )
        return self


class FilterConfig(Config):
    metric: str = ""
    """The part of the reward that decides whether a group is kept, e.g. "accuracy". Empty: the whole reward. Either as
    the environment gave it, before the over-long penalty."""
    drop_equal_rewards: bool = False
    """Dynamic sampling: a group whose rewards are all equal teaches nothing; drop it and sample another."""
    equal_tolerance: float = Field(1e-8, ge=0)
    """Rewards that differ by no more than this are equal."""
    min_mean_reward: float | None = None
    """Drop groups with a lower mean reward as too hard. None: off."""
    max_mean_reward: float | None = None
    """Drop groups with a higher mean reward as too easy. None: off."""
    overlong: OverlongConfig | None = None
    """None: off."""
    mask_truncated: bool = False
    """Take answers cut off by the length limit out of the loss; they still count in their group's baseline."""
    train_failed: bool = False
    """Train on what could not be scored (a reward that raised or hung, an episode that broke) with the reward it
    carries, missing parts being 0. False: it is in no baseline and in no loss, since it may have been right."""


def group_rewards(trajectories: Sequence[Trajectory], config: FilterConfig) -> npt.NDArray[np.float64]:
    """What a group is judged by: one number to each episode that could be scored, of its first agent."""
    episodes: dict[str, float] = {}
    for trajectory in trajectories:
        episode = trajectory.episode_id or trajectory.id
        if episode in episodes or (trajectory.error is not None and not config.train_failed):
            continue
        if config.metric and config.metric not in trajectory.reward_parts and trajectory.error is None:
            raise InvalidSampleError(
                f"filters.metric = {config.metric!r} is no part of {trajectory.id}'s reward, which has "
                f"{sorted(trajectory.reward_parts) or 'none'}: name one of them, or leave it empty"
            )
        parts = trajectory.reward_parts
        episodes[episode] = parts.get(config.metric, 0.0) if config.metric else trajectory.reward
    return np.array(list(episodes.values()), dtype=np.float64)


def group_verdict(
    trajectories: Sequence[Trajectory], config: FilterConfig, *, min_samples: int = 1
) -> Verdict:
    """Keep a group or say why not. A group of one is never dropped for equal rewards."""
    if not trajectories:
        return Verdict(DropReason.EMPTY)
    rewards = group_rewards(trajectories, config)
    has_failed = any(t.error is not None for t in trajectories) and not config.train_failed
    if has_failed and rewards.size < max(1, min_samples):
        return Verdict(DropReason.FAILED)
    if not np.isfinite(rewards).all():
        return Verdict(DropReason.NOT_FINITE)
    if config.drop_equal_rewards and rewards.size > 1 and np.ptp(rewards) <= config.equal_tolerance:
        return Verdict(DropReason.EQUAL_REWARDS)
    mean = float(rewards.mean())
    if config.min_mean_reward is not None and mean < config.min_mean_reward:
        return Verdict(DropReason.TOO_HARD)
    if config.max_mean_reward is not None and mean > config.max_mean_reward:
        return Verdict(DropReason.TOO_EASY)
    return Verdict()


def overlong_penalty(num_tokens: int, config: OverlongConfig) -> float:
    """What to add to the reward of an answer of n tokens, 0 or negative:

    0 for n ≤ L_max − L_cache;  p · (L_max − L_cache − n) / L_cache  up to L_max;  −p beyond.
    """
    excess = num_tokens - (config.limit_tokens - config.buffer_tokens)
    return -config.penalty * min(max(excess / config.buffer_tokens, 0.0), 1.0)
