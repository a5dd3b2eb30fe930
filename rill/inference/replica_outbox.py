"""What a replica's engine reports, on its way to the parent: collected, packed, sent from one thread.

    engine thread                              flush thread                          parent's reader
    add_streamed(delta) ──▶ streamed ──┐ first tokens and ends: at once       ┌──▶ ("news", PackedDeltas, ends)
    add_recorded(delta) ──▶ recorded ──┤ streamed: every _STREAM_WAIT_S       │
    add_end(completion) ──▶ ends ──────┘ recorded: every RECORD_WAIT_S ──────┘

The engine's thread must not pay for this: it appends, and wakes the flush thread only for what is urgent. Deltas travel
as a few arrays for all requests together, since pickling three small arrays for each token costs more than making it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rill.inference.base import Completion, Delta, TopTokens
from rill.types import Floats, Ints, StopReason, TokenIds

_COMPANY_WAIT_S = 0.002
"""How long what is urgent waits for more of its kind."""
_STREAM_WAIT_S = 0.02
"""How long a streamed delta may wait, other than a request's first."""
RECORD_WAIT_S = 0.1
"""How long a delta that nobody streams may wait: at most this much work is lost with the process."""

End = Completion | tuple[str, Exception]
"""How a request ended: with a completion, or (its id, why not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDeltas:
    """One delta for each of several requests, their tokens one after the other."""

    request_ids: list[str]
    lengths: list[int]
    stop_reasons: list[StopReason | None]
    token_ids: TokenIds
    logprobs: Floats
    versions: Ints
    tops: dict[str, TopTokens]

    @classmethod
    def pack(cls, deltas: Sequence[Delta]) -> PackedDeltas | None:
        """Deltas of one request become one. None where there are none."""
        by_request: dict[str, list[Delta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        if not by_request:
            return None
        ordered = [delta for parts in by_request.values() for delta in parts]
        return cls(
            request_ids=list(by_request),
            lengths=[sum(len(part.token_ids) for part in parts) for parts in by_request.values()],
            stop_reasons=[parts[-1].stop_reason for parts in by_request.values()],
            token_ids=np.concatenate([delta.token_ids for delta in ordered]),
            logprobs=np.concatenate([delta.logprobs for delta in ordered]),
            versions=np.concatenate([delta.versions for delta in ordered]),
            tops={
                name: top
                for name, parts in by_request.items()
                if (top := TopTokens.joined(part.top for part in parts)) is not None
            },
        )

    def unpack(self) -> list[Delta]:
        found, start = [], 0
        for request_id, length, reason in zip(self.request_ids, self.lengths, self.stop_reasons, strict=True):
            part = slice(start, start + length)
            start += length
            found.append(
                Delta(
                    request_id=request_id,
                    token_ids=self.token_ids[part],
                    logprobs=self.logprobs[part],
                    versions=self.versions[part],
                    stop_reason=reason,
                    top=self.tops.get(request_id),
                )
            )
        return found


class Outbox:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._news = threading.Condition()
        self._streamed: list[Delta] = []
        self._recorded: list[Delta] = []
        self._ends: list[End] = []
        self._begun: set[str] = set()
        """Streams whose first token is out."""
        self._is_urgent = False
        threading.Thread(target=self._flush_forever, name="replica-outbox", daemon=True).start()

    def add_streamed(self, delta: Delta) -> None:
        with self._news:
            is_first = delta.request_id not in self._begun
            if is_first:
                self._begun.add(delta.request_id)
            self._streamed.append(delta)
            self._wake(is_urgent=is_first)

    def add_recorded(self, delta: Delta) -> None:
        with self._news:
            self._recorded.append(delta)
            self._wake(is_urgent=False)

    def add_end(self, end: End) -> None:
        with self._news:
            self._begun.discard(_request_id(end))
            self._ends.append(end)
            self._wake(is_urgent=True)

    def send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            return  # the parent is gone; the receive loop ends this process

    def _wake(self, *, is_urgent: bool) -> None:
        """A flush thread that waits for anything, or that must hurry now."""
        num_news = len(self._streamed) + len(self._recorded) + len(self._ends)
        if num_news == 1 or (is_urgent and not self._is_urgent):
            self._is_urgent |= is_urgent
            self._news.notify()

    def _flush_forever(self) -> None:
        recorded_at = 0.0
        while True:
            with self._news:
                self._news.wait_for(lambda: self._streamed or self._recorded or self._ends)
                wait_s = _STREAM_WAIT_S if self._streamed else RECORD_WAIT_S
                is_urgent = self._news.wait_for(lambda: self._is_urgent, wait_s)
            if is_urgent:
                time.sleep(_COMPANY_WAIT_S)
            with self._news:
                self._is_urgent = False
                deltas, self._streamed = self._streamed, []
                ends, self._ends = self._ends, []
                # A completion holds all its tokens: what was only recorded need not travel again, nor may it travel
                # later, when another request may have this id.
                ended = {_request_id(end) for end in ends}
                self._recorded = [delta for delta in self._recorded if delta.request_id not in ended]
                if time.monotonic() - recorded_at >= RECORD_WAIT_S:
                    recorded_at = time.monotonic()
                    deltas += self._recorded
                    self._recorded = []
            if deltas or ends:
                self.send(("news", PackedDeltas.pack(deltas), ends))


def _request_id(end: End) -> str:
    return end.request_id if isinstance(end, Completion) else end[0]
