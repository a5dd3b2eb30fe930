"""What happened, bounded: one record per finished call of a worker. A service of the hub.

A worker tells what its call took from and put into which channels, which turns on devices it had, how long its memory
took to come and go and what it waited for. Calls that last are told in parts. From these records alone the graph of a
workflow can be drawn (rill/planning).
"""

from __future__ import annotations

from collections import deque

import msgspec

MAX_RECORDS = 20_000


class Flowed(msgspec.Struct, array_like=True):
    items: int = 0
    num_bytes: int = 0
    weight: float = 0.0

    def count(self, num_bytes: int, weight: float) -> None:
        self.items += 1
        self.num_bytes += num_bytes
        self.weight += weight


class TurnRecord(msgspec.Struct, array_like=True, frozen=True):
    devices: list[int]
    started_s: float
    ended_s: float
    held_bytes: int = 0
    """Of the first device's memory, by this process when the turn ended."""
    room_bytes: int = 0
    """That it could have held beside what others did. 0: not known."""


class CallRecord(msgspec.Struct, kw_only=True):
    """One call on one rank, or a part of a long one. Times are time.time()."""

    group: str
    rank: int
    method: str
    started_s: float
    ended_s: float = 0.0
    is_whole: bool = True
    """False: a part of a call that goes on."""
    took: dict[str, Flowed] = {}
    put: dict[str, Flowed] = {}
    turns: list[TurnRecord] = []
    onload_s: float = 0.0
    offload_s: float = 0.0
    waits_s: dict[str, float] = {}
    """Seconds by what was waited for: "channel:prompts", "devices"."""


class History:
    def __init__(self) -> None:
        self._records: deque[CallRecord] = deque(maxlen=MAX_RECORDS)

    def on_tell(self, client: str, seq: int, record: CallRecord) -> None:
        self._records.append(record)

    def on_calls(self, client: str, seq: int, since_s: float) -> list[CallRecord]:
        return [record for record in self._records if record.ended_s > since_s]
