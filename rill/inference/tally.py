"""What an engine has done since it started, and the one way to report it: every engine owns a Tally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rill.inference.base import EngineStats
from rill.types import PolicyVersion

COUNTS = tuple(name for name in EngineStats.__dataclass_fields__ if name.startswith("num_"))
"""What engines count, by the names in EngineStats."""


class Tally:
    """Written by the engine's own thread; any may read."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTS, 0)

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self._counts[name] += count

    def end(self, *, num_prompt: int, num_cached: int) -> None:
        """A request has ended; so many tokens of its prompt came from the cache."""
        counts = self._counts
        counts["num_finished"] += 1
        counts["num_prompt_tokens"] += num_prompt
        counts["num_cached_tokens"] += num_cached

    def stats(self, **now: Any) -> EngineStats:
        """The counts, with what is under way now."""
        return EngineStats(**(self._counts | now))


def total(parts: Sequence[EngineStats], *, version: PolicyVersion, extra: dict[str, float]) -> EngineStats:
    """Several engines as one: counts add up; version and extra are the owner's."""
    sums = {name: sum(getattr(stats, name) for stats in parts) for name in COUNTS}
    return EngineStats(version=version, extra=extra, **sums)
