"""What an advantage estimator is: group-scoped (needs one prompt's samples) or batch-scoped (needs them all).

A group-scoped one runs where the group lives, on NumPy scalars, without a process group. A batch-scoped one is
a function over flat tokens; statistics that must agree between ranks go through the `reduce` it is given.

G sample of one group, N token, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rill.algorithms.base import Metric, Need, Reduce
from rill.errors import InvalidSampleError

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """Whole sequences, and whole groups where the estimator looks at groups, of one rank."""

    mask_N: Tensor
    """1.0 on trained tokens, else 0.0."""
    seq_N: Tensor
    num_seqs: int
    rewards_S: Tensor
    """One reward to a sequence; it lands on the last trained token."""
    group_S: Tensor | None = None
    """int64: sequences of one prompt share a number. Any numbers."""
    greedy_rewards_S: Tensor | None = None
    """The reward of the greedy answer to the sequence's prompt."""
    token_rewards_N: Tensor | None = None
    """Added to the sequence's reward: process rewards, rewards of single turns."""
    logprobs_N: Tensor | None = None
    """log π_old, for a KL penalty in the reward."""
    ref_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    """V of the state before the token."""
    bootstrap_values_S: Tensor | None = None
    """V of the state after the last trained token; 0 (or None) where the episode truly ended."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Per token, 0 where the mask is 0."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    """What the critic learns; None without one."""
    metrics: dict[str, Metric] = field(default_factory=dict)


class GroupAdvantage(ABC):
    """One scalar to each sample of a group."""

    needs: frozenset[Need] = frozenset()

    reads_lengths: bool = False
    """True where the samples' numbers of trained tokens count; they must be given then."""

    @abstractmethod
    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        """Advantages of one group; the inputs are finite and not empty."""


class BatchAdvantage(ABC):
    """Per-token advantages that need the whole batch."""

    needs: frozenset[Need] = frozenset()

    @abstractmethod
    def batch(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """`rewards_N` is the reward of each token and batch.rewards_S its sum over each sequence, both with the
        KL penalty taken; per-token fields are 0 on untrained tokens."""


def checked_group(rewards_G: npt.ArrayLike, lengths_G: npt.ArrayLike | None) -> tuple[Scores, Scores]:
    """Rewards and lengths as float64, or an InvalidSampleError that says what is wrong with them."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise InvalidSampleError(
            f"a group needs one reward per sample, got an array of shape {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        raise InvalidSampleError(f"rewards must be finite, got {rewards.tolist()}: mend the reward function")
    lengths = np.ones_like(rewards) if lengths_G is None else np.asarray(lengths_G, dtype=np.float64)
    if lengths.shape != rewards.shape:
        raise InvalidSampleError(f"{rewards.size} rewards but {lengths.size} lengths in one group")
    if not (np.isfinite(lengths).all() and (lengths >= 0).all()):
        raise InvalidSampleError(f"lengths must be finite and not negative, got {lengths.tolist()}")
    return rewards, lengths
