"""What happened outside of the model during an episode: tool calls and their results, by key.

Owned by whoever runs episodes (a journal on disk, or the memory of a worker); written by rill.envs.reply. An episode
that is resumed runs from its start and finds its tool results here, so that no side effect happens twice.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Protocol


class Missing(Enum):
    MISSING = "missing"


MISSING: Final = Missing.MISSING
"""No such event. None is a value."""

BEGUN = "begun"
"""The value of a call that was started and whose result is not known."""


class EventLog(Protocol):
    """Of one episode. Values are plain (JSON) and small: a tool's result as the model read it."""

    def lookup(self, key: str) -> Any:
        """The last value recorded under the key, or MISSING."""
        ...

    def record(self, key: str, value: Any) -> None: ...


class MemoryLog:
    """An EventLog in this process; `events` can be kept and handed to the next attempt."""

    def __init__(self, events: dict[str, Any] | None = None) -> None:
        self.events = {} if events is None else events

    def lookup(self, key: str) -> Any:
        return self.events.get(key, MISSING)

    def record(self, key: str, value: Any) -> None:
        self.events[key] = value
