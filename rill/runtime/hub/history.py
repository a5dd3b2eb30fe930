"""What happened, bounded: one record per finished call of a worker.

    Recorder, in every process: counts per call and thread ──at its end, or in parts──▶ History, a service of the hub

A worker tells what its call took from and put into which channels, which turns on devices it had, how long its memory
took to come and go and what it waited for. From these records alone the graph of a workflow can be drawn
(rill/planning).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from rill.errors import RunError
from rill.runtime.process import waits

if TYPE_CHECKING:
    from rill.runtime.hub.client import HubClient
    from rill.runtime.hub.messages import Item

MAX_RECORDS = 20_000
PART_S = 5.0
"""A call that lasts longer is told in parts of this length."""
WORTH_S = 0.01
"""A call that moved nothing and was shorter is not told."""


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


class Recorder:
    """Thread-safe."""

    def __init__(self, group: str, rank: int, hub: HubClient) -> None:
        self._group = group
        self._rank = rank
        self._calls: dict[int, CallRecord] = {}
        self._hub = hub
        hub.add_ticker(self._tick)
        waits.after.append(self._waited)

    def close(self) -> None:
        waits.after.remove(self._waited)

    def begin(self, method: str) -> None:
        self._calls[threading.get_ident()] = self._record(method)

    def end(self) -> None:
        record = self._calls.pop(threading.get_ident(), None)
        if record is not None:
            self._tell(record, is_whole=True)

    def took(self, channel: str, items: Sequence[Item]) -> None:
        if record := self._calls.get(threading.get_ident()):
            flowed = record.took.get(channel) or record.took.setdefault(channel, Flowed())
            for item in items:
                flowed.count(item.num_bytes, item.weight)

    def put(self, channel: str, num_bytes: int, weight: float) -> None:
        if record := self._calls.get(threading.get_ident()):
            flowed = record.put.get(channel) or record.put.setdefault(channel, Flowed())
            flowed.count(num_bytes, weight)

    def had_turn(self, devices: list[int], seconds: float, held_bytes: int, room_bytes: int) -> None:
        """A turn on devices has just ended."""
        if record := self._calls.get(threading.get_ident()):
            now_s = time.time()
            record.turns.append(TurnRecord(devices, now_s - seconds, now_s, held_bytes, room_bytes))

    def loaded(self, seconds: float) -> None:
        if record := self._calls.get(threading.get_ident()):
            record.onload_s += seconds

    def offloaded(self, seconds: float) -> None:
        """Memory went out, on the lock's own thread, while no call had the devices."""
        record = self._record("offload")
        record.started_s -= seconds
        record.offload_s = seconds
        self._tell(record, is_whole=True)

    def _waited(self, on: str, seconds: float) -> None:
        if record := self._calls.get(threading.get_ident()):
            record.waits_s[on] = record.waits_s.get(on, 0.0) + seconds

    def _record(self, method: str) -> CallRecord:
        return CallRecord(group=self._group, rank=self._rank, method=method, started_s=time.time())

    def _tell(self, record: CallRecord, *, is_whole: bool) -> None:
        record.ended_s = time.time()
        record.is_whole = is_whole
        has_moved = record.took or record.put or record.turns or record.offload_s
        if has_moved or record.ended_s - record.started_s >= WORTH_S:
            with suppress(RunError):  # without a hub there is no history, and no call depends on it
                self._hub.submit("history.tell", record)

    def _tick(self, _: float) -> float:
        """On the hub's io thread."""
        now_s = time.time()
        for thread, record in list(self._calls.items()):
            if now_s - record.started_s >= PART_S and self._calls.get(thread) is record:
                self._calls[thread] = self._record(record.method)
                self._tell(record, is_whole=False)
        return PART_S
