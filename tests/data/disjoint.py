"""A problem is on one side only."""

from __future__ import annotations

from collections.abc import Iterable

from rill.data.base import content_key
from rill.types import Prompt


def assert_disjoint(train: Iterable[Prompt], held_out: Iterable[Prompt]) -> None:
    both = {content_key(p) for p in train} & {content_key(p) for p in held_out}
    assert not both, sorted(both)[:3]
