"""What happened outside of the model during an episode: tool calls and their results, by key.

Owned by whoever runs episodes, who may keep what is recorded (rill.workers.episodes has it in a journal); written by
rill.envs.reply. An episode that is resumed runs from its start and finds its tool results here, so that no side effect
happens twice.
"""

from __future__ import annotations

from typing import Any

BEGUN = "begun"
"""The value of a call that was started and whose result is not known."""


class EventLog:
    """Of one episode. `events` can be kept and handed to the next attempt; values are plain (JSON) and small: a tool's
    result as the model read it."""

    def __init__(self, events: dict[str, Any] | None = None) -> None:
        self.events = {} if events is None else events

    def record(self, key: str, value: Any) -> None:
        self.events[key] = value
