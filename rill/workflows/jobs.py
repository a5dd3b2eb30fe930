"""The small records that pass between the feeder and the workers around it. None of them holds a finished sample.

    feeder ── GroupJob ──▶ rollout workers ── Outcome ──▶ feeder ── StepPlan ──▶ driver ──▶ trainers
                                └────────── Sample ── (rollouts channel) ────────────────────▲

A job and an outcome are one group each; they never reach the driver. A plan is a whole step, sealed, which the driver
hands on without looking inside: its cost grows neither with the bytes nor with the groups of a batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rill.inference.base import Completion
from rill.training.balance import partition
from rill.types import Ints, PolicyVersion, Prompt

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
class StepPlan:
    """The groups of one optimisation step. Every trainer rank derives the same shares from it."""

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

    def share(self, rank: int, num_ranks: int, *, whole_groups: bool) -> list[str]:
        """The sample keys of one rank: balanced by cost, in batch order. `whole_groups` keeps siblings together."""
        return self.open().share(rank, num_ranks, whole_groups=whole_groups)


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

    def share(self, rank: int, num_ranks: int, *, whole_groups: bool) -> list[str]:
        ends_G = np.cumsum(self.sizes_G)
        if num_ranks == 1:
            return self._keys(range(len(self.sizes_G)))
        if whole_groups:
            costs_G = np.add.reduceat(self.lengths_S, ends_G - self.sizes_G)
            return self._keys(sorted(partition(costs_G.astype(float).tolist(), num_ranks)[rank]))
        mine = sorted(partition(self.lengths_S.astype(float).tolist(), num_ranks)[rank])
        groups = np.searchsorted(ends_G, mine, side="right").tolist()
        return [
            self._key(g, sample - int(ends_G[g] - self.sizes_G[g]))
            for sample, g in zip(mine, groups, strict=True)
        ]

    def _keys(self, groups: Sequence[int]) -> list[str]:
        return [self._key(g, i) for g in groups for i in range(int(self.sizes_G[g]))]

    def _key(self, group: int, sample: int) -> str:
        return sample_key(group_id(int(self.indices_G[group])), sample, self.makers[self.makers_G[group]])


def group_id(index: int) -> str:
    """The name of a group, in logs, sample keys and seeds."""
    return f"g{index:08d}"


def sample_key(group: str, sample: int, maker: str) -> str:
    """Where a sample lies in the rollouts channel."""
    return f"{group}/{sample}@{maker}"
