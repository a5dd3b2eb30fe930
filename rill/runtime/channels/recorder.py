"""What the calls of this process do, counted as they do it: the material of the hub's history (hub/history.py).

One record per call and thread; told when the call ends, and in parts while it lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rill.errors import RunError
from rill.runtime.hub.history import CallRecord, Flowed, TurnRecord
from rill.runtime.hub.messages import Item
from rill.runtime.process import waits

if TYPE_CHECKING:
    from rill.runtime.hub.client import HubClient

PART_S = 5.0
"""A call that lasts longer is told in parts of this length."""
WORTH_S = 0.01
"""A call that moved nothing and was shorter is not told."""


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
