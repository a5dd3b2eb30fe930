"""The small records that pass between the feeder and the workers around it. None of them holds a finished sample.

    feeder ── GroupJob ──▶ rollout workers ── Outcome ──▶ feeder ── StepPlan ──▶ driver ──▶ trainers
                                └────────── Sample ── (rollouts channel) ────────────────────▲

A job and an outcome are one group each; they never reach the driver. A plan is a whole step, sealed, which the driver
hands on without looking inside: its cost grows neither with the bytes nor with the groups of a batch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rill.inference.base import Completion
from rill.training.balance import CostModel, partition
from rill.types import Ints, PolicyVersion, Prompt
from rill.workflows.publishing import Synced

BY_TOKENS = CostModel()
Answers = Mapping[str, Completion]
"""What was said so far, by request id. One with the stop reason ABORTED is to be continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """One prompt to be answered `group_size` times."""

    index: int
    """Position in the order of admission; decides the order inside a batch."""
    prompt: Prompt
    group_size: int
    answers: Answers = field(default_factory=dict)
    """From an earlier attempt that was put back: they are not asked for again."""
    num_returns: int = 0
    """How often it was put back."""

    @property
    def id(self) -> str:
        return group_id(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a group: kept, dropped by a filter, or put back unfinished."""

    index: int
    lengths: tuple[int, ...] = ()
    """Tokens of each sample that lies in the rollouts channel; empty unless it is kept."""
    dropped: str | None = None
    """Why a filter dropped it; None: not dropped."""
    returned: Answers | None = None
    """What was said when it was put back; None: it was finished."""
    oldest_version: PolicyVersion = PolicyVersion(0)
    metrics: dict[str, float] = field(default_factory=dict)
    maker: str = ""
    """The process that made the group. A job that outlived its worker is done again by another: part of the keys, so
    that samples of the two never mix."""

    @property
    def group_id(self) -> str:
        return group_id(self.index)

    @property
    def is_kept(self) -> bool:
        return self.dropped is None and self.returned is None

    @property
    def keys(self) -> list[str]:
        return [sample_key(self.group_id, i, self.maker) for i in range(len(self.lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrained:
    """All groups between admission and training: what a checkpoint holds of them."""

    begun: list[GroupJob]
    """To be done, or done to their end behind the answers they hold."""
    kept: list[tuple[GroupJob, Outcome]]
    """Finished; their samples wait to be trained on."""


class StepPlan(NamedTuple):
    """The groups of one optimisation step. Every trainer rank derives the same shares from it.

    A tuple, as everything that passes the driver once a step: it is read and written there in a few microseconds.
    """

    step: int
    version: PolicyVersion
    num_samples: int
    num_tokens: int
    content: bytes
    """The groups themselves, sealed: the driver passes them on without building an object for each."""

    @staticmethod
    def of(outcomes: Sequence[Outcome], *, step: int, version: PolicyVersion) -> StepPlan:
        groups = PlannedGroups.of(outcomes)
        return StepPlan(
            step=step,
            version=version,
            num_samples=len(groups.lengths_S),
            num_tokens=int(groups.lengths_S.sum()),
            content=pickle.dumps(groups, protocol=5),
        )

    def open(self) -> PlannedGroups:
        groups = pickle.loads(self.content)
        assert isinstance(groups, PlannedGroups)
        return groups

    def share(
        self, rank: int, num_ranks: int, *, whole_groups: bool, cost: CostModel = BY_TOKENS
    ) -> list[str]:
        """The sample keys of one rank: balanced by cost, in batch order. `whole_groups` keeps siblings together."""
        with _dividing:  # ranks that share a process ask at the same time, and divide once
            return _shares(self.content, num_ranks, whole_groups, cost)[rank]


class TrainedStep(NamedTuple):
    """What a training step gives back: its figures, and how the new weights reached the engines. One call and one
    answer."""

    figures: Mapping[str, float]
    synced: Synced | None
    """None from trainer ranks other than the first."""
    sync_s: float
    """Of the step: gathering the new weights and bringing the engines to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroups:
    """A batch as columns. Axes: G group, in batch order; S sample, group by group."""

    indices_G: Ints
    sizes_G: Ints
    """Samples of each group."""
    makers_G: Ints
    """Position in `makers`."""
    lengths_S: Ints
    """Tokens of each sample."""
    makers: tuple[str, ...]

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> PlannedGroups:
        """By admission, so that the batch does not depend on which group happened to finish first."""
        ordered = sorted(outcomes, key=lambda outcome: outcome.index)
        makers = {maker: n for n, maker in enumerate(sorted({outcome.maker for outcome in ordered}))}
        return PlannedGroups(
            indices_G=np.array([outcome.index for outcome in ordered], np.int32),
            sizes_G=np.array([len(outcome.lengths) for outcome in ordered], np.int32),
            makers_G=np.array([makers[outcome.maker] for outcome in ordered], np.int32),
            lengths_S=np.array([n for outcome in ordered for n in outcome.lengths], np.int32),
            makers=tuple(makers),
        )

    @property
    def ids(self) -> list[str]:
        return [group_id(index) for index in self.indices_G.tolist()]

    @property
    def keys_S(self) -> list[str]:
        """Where the samples lie."""
        rows = zip(self.ids, self.sizes_G.tolist(), self.makers_G.tolist(), strict=True)
        return [sample_key(group, i, self.makers[maker]) for group, size, maker in rows for i in range(size)]

    def shares(self, num_ranks: int, *, whole_groups: bool, cost: CostModel = BY_TOKENS) -> list[list[str]]:
        """The sample keys of every rank."""
        keys_S, costs_S = self.keys_S, cost(self.lengths_S.astype(np.int64))
        if num_ranks == 1:
            return [keys_S]
        if not whole_groups:
            return [[keys_S[s] for s in sorted(part)] for part in partition(costs_S, num_ranks)]
        ends_G = np.cumsum(self.sizes_G)
        starts_G = ends_G - self.sizes_G
        parts = partition(np.add.reduceat(costs_S, starts_G), num_ranks)
        return [[key for g in sorted(part) for key in keys_S[starts_G[g] : ends_G[g]]] for part in parts]


_dividing = threading.Lock()


@lru_cache(maxsize=4)
def _shares(content: bytes, num_ranks: int, whole_groups: bool, cost: CostModel) -> list[list[str]]:
    """A plan is divided once in a process, however many stages and ranks there ask for their share."""
    groups = pickle.loads(content)
    assert isinstance(groups, PlannedGroups)
    return groups.shares(num_ranks, whole_groups=whole_groups, cost=cost)


def group_id(index: int) -> str:
    """The name of a group, in logs, sample keys and seeds."""
    return f"g{index:08d}"


def sample_key(group: str, sample: int, maker: str) -> str:
    """Where a sample lies in the rollouts channel."""
    return f"{group}/{sample}@{maker}"
