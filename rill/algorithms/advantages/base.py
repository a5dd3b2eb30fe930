"""What an advantage estimator is, and what it sees of a batch.

A GroupAdvantage gives one number to each episode of a group, on NumPy scalars. A TokenAdvantage is a function over flat
tokens. Both say in `scope` what must be together in one call; statistics that must agree between ranks go through the
`reduce` they are given.

G episode of one group, N token, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rill.algorithms.base import Metric, Need, Reduce
from rill.errors import InvalidSampleError

Scores = npt.NDArray[np.float64]


class Scope(StrEnum):
    """What an estimator looks at together."""

    SAMPLE = "sample"  # one sequence: any chunk of a batch will do
    GROUP = "group"  # the samples of one prompt: chunks of whole groups
    BATCH = "batch"  # the whole batch on all ranks; groups are whole on a rank


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """Whole sequences, and whole groups where the estimator looks at groups, of one rank."""

    mask_N: Tensor
    """1.0 on trained tokens, else 0.0."""
    seq_N: Tensor
    num_seqs: int
    rewards_S: Tensor
    """The whole reward of the sequence's episode; it lands on the last trained token unless token_rewards_N says
    where it was given."""
    group_S: Tensor | None = None
    """int64: sequences of one prompt share a number. Any numbers."""
    episode_S: Tensor | None = None
    """int64: sequences of one agent in one episode share a number and count once in their group. None: each its own."""
    lengths_S: Tensor | None = None
    """Trained tokens before any were masked. None: those of the mask."""
    parts_S: Mapping[str, Tensor] = field(default_factory=dict)
    """The parts of the reward by name."""
    is_scored: bool = True
    """False: every sequence failed, and parts that are not there are 0."""
    greedy_rewards_S: Tensor | None = None
    """The reward of the greedy answer to the sequence's prompt."""
    token_rewards_N: Tensor | None = None
    """Where the reward was given, on trained tokens: by turn or by token. None: all at the end."""
    turn_N: Tensor | None = None
    """int64: the turn of each token."""
    anchor_N: Tensor | None = None
    """int64: turns that answer the same observation, whatever came before it, share a number."""
    logprobs_N: Tensor | None = None
    """log π_old, for a KL penalty in the reward."""
    ref_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    """V of the state before the token."""
    energies_N: Tensor | None = None
    """1 − 2π(a) + Σ_v π(v)²: the squared gradient of log π in the logits."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Per token, 0 where the mask is 0."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    """What the critic learns; None without one."""
    left_out_S: Tensor | None = None
    """bool: sequences that are not trained on. None: all are."""
    metrics: dict[str, Metric] = field(default_factory=dict)


class GroupAdvantage(ABC):
    """One scalar to each episode of a group."""

    needs: frozenset[Need] = frozenset()
    scope = Scope.GROUP

    min_samples: int = 2
    """Episodes below which the group has nothing to compare."""
    reads_lengths: bool = False
    """True where the samples' numbers of trained tokens count; they must be given then."""
    drops_zeros: bool = False
    """True where an advantage of 0 means that the sample is not trained on."""
    allows_steps: bool = True
    """False where the advantage holds for the first optimizer step of a batch only."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def group(self, rewards_G: Scores, lengths_G: Scores, greedy_reward: float | None) -> Scores:
        """Advantages of one group; the inputs are finite and not empty."""


class TokenAdvantage(ABC):
    """Advantages of flat tokens."""

    needs: frozenset[Need] = frozenset()
    scope = Scope.BATCH

    min_samples: int = 1
    allows_steps: bool = True
    reads_rewards: bool = True
    """False where it knows the parts of a reward alone, so that a penalty in the reward would be lost."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """`rewards_N` is the reward of each token and batch.rewards_S that of each sequence's whole episode, both with
        the KL penalty taken; per-token fields are 0 on untrained tokens."""


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
