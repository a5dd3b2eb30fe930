"""The small records that pass between the loop and its workers. None of them holds tokens.

    loop ── GroupJob ──▶ rollout workers ── Outcome ──▶ loop ── StepPlan ──▶ trainers
                              └────────── Sample ── (rollouts channel) ─────────▲

The loop sees descriptors only, so its cost does not grow with the bytes of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rill.training.balance import partition
from rill.types import PolicyVersion, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """One prompt to be answered `group_size` times."""

    id: str
    index: int
    """Position in the order of admission; decides the order inside a batch."""
    prompt: Prompt
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a group."""

    group_id: str
    index: int
    prompt_id: str
    lengths: tuple[int, ...] = ()
    """Tokens of each sample that lies in the rollouts channel; empty when the group was dropped."""
    dropped: str | None = None
    """Why a filter dropped it; None: kept."""
    oldest_version: PolicyVersion = PolicyVersion(0)
    metrics: dict[str, float] = field(default_factory=dict)
    maker: str = ""
    """The process that made the group. A job that outlived its worker is done again by another: part of the keys, so
    that samples of the two never mix."""

    @property
    def keys(self) -> list[str]:
        return [sample_key(self.group_id, i, self.maker) for i in range(len(self.lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The groups of one optimisation step. Every trainer rank derives the same shares from it."""

    step: int
    version: PolicyVersion
    outcomes: tuple[Outcome, ...]

    def share(self, rank: int, num_ranks: int, *, whole_groups: bool) -> list[str]:
        """The sample keys of one rank: balanced by cost, in batch order. `whole_groups` keeps siblings together."""
        if num_ranks == 1:
            return [key for outcome in self.outcomes for key in outcome.keys]
        if whole_groups:
            units = [(outcome.keys, float(sum(outcome.lengths))) for outcome in self.outcomes]
        else:
            units = [
                ([key], float(n)) for o in self.outcomes for key, n in zip(o.keys, o.lengths, strict=True)
            ]
        mine = sorted(partition([cost for _, cost in units], num_ranks)[rank])
        return [key for i in mine for key in units[i][0]]

    @property
    def num_samples(self) -> int:
        return sum(len(outcome.lengths) for outcome in self.outcomes)

    @property
    def num_tokens(self) -> int:
        return sum(sum(outcome.lengths) for outcome in self.outcomes)


def sample_key(group_id: str, sample: int, maker: str) -> str:
    """Where a sample lies in the rollouts channel."""
    return f"{group_id}/{sample}@{maker}"


def in_batch_order(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """By admission, so that the batch does not depend on which group happened to finish first."""
    return tuple(sorted(outcomes, key=lambda outcome: outcome.index))
