"""What an engine has done since it started, and the one way to report it: every engine owns a Tally."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rill.inference.base import EngineStats
from rill.types import PolicyVersion


class Tally:
    """Written by the engine's own thread; any may read."""

    def __init__(self) -> None:
        self._num_finished = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    def grow(self, num_tokens: int) -> None:
        """Requests have gained so many tokens."""
        self._num_generated_tokens += num_tokens

    def end(self, *, num_prompt: int, num_cached: int) -> None:
        """A request has ended; so many tokens of its prompt came from the cache."""
        self._num_finished += 1
        self._num_prompt_tokens += num_prompt
        self._num_cached_tokens += num_cached

    def stats(
        self,
        *,
        num_running: int,
        num_waiting: int,
        version: PolicyVersion,
        num_preempted: int = 0,
        num_kv_blocks: int = 0,
        num_free_kv_blocks: int = 0,
        extra: Mapping[str, float] | None = None,
    ) -> EngineStats:
        """The counts with what is under way now. Blocks: 0 where the engine does not know them."""
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_finished=self._num_finished,
            num_preempted=num_preempted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_kv_blocks=num_kv_blocks,
            num_free_kv_blocks=num_free_kv_blocks,
            version=version,
            extra=dict(extra or {}),
        )


def total(parts: Iterable[EngineStats], *, version: PolicyVersion, extra: Mapping[str, float]) -> EngineStats:
    """Several engines as one: counts add up; version and extra are the owner's."""
    found = list(parts)
    counts = [name for name in EngineStats.__dataclass_fields__ if name.startswith("num_")]
    sums = {name: sum(getattr(stats, name) for stats in found) for name in counts}
    return EngineStats(**sums, version=version, extra=dict(extra))
