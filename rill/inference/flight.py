"""One request on its way: what it has so far, and how it goes on when it is interrupted or its replica dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from rill.inference.base import Completion, Delta, Request
from rill.inference.continued import rest_of, together
from rill.types import StopReason

log = logging.getLogger(__name__)


class Flight:
    """`_done` holds the tokens of attempts that were cut short; `_now` those of the present one, as far as it told."""

    def __init__(self, request: Request, on_delta: Callable[[Delta], None] | None) -> None:
        self.request = request
        self.on_delta = on_delta
        self.future: Future[Completion] = Future()
        self.replica: Any = None
        """Where it runs, for the router."""
        self.num_losses = 0
        self.parked_at = 0.0
        self.is_aborted = False
        self._lock = threading.Lock()
        self._done: list[Delta] = []
        self._now: list[Delta] = []

    @property
    def num_kept(self) -> int:
        return sum(len(d.token_ids) for d in self._done)

    def next_request(self) -> Request:
        """The request as the next replica gets it: everything so far is its prompt."""
        if not self._done:
            return self.request
        return rest_of(self.request, np.concatenate([d.token_ids for d in self._done]))

    def record(self, delta: Delta) -> None:
        with self._lock:
            self._now.append(delta)
        if self.on_delta is not None:
            try:
                self.on_delta(delta)
            except (
                Exception
            ):  # boundary: a caller's own code; neither its request nor the engine ends with it
                log.exception("on_delta of request %s failed and will not be called again", self.request.id)
                self.on_delta = None

    def restart(self) -> None:
        """Keep what the dead replica told; the next one goes on from there."""
        with self._lock:
            self._done += self._now
            self._now = []

    def joined(self, completion: Completion) -> Completion:
        """A replica's completion with the tokens of those before it."""
        return replace(completion, **together([*self._done, completion])) if self._done else completion

    def already_ended(self) -> Completion | None:
        """The replica died after the last token: its completion can be made from the deltas."""
        with self._lock:
            parts = self._done + self._now
        reason = parts[-1].stop_reason if parts else None
        if reason is None and sum(len(d.token_ids) for d in parts) >= self.request.sampling.max_new_tokens:
            reason = StopReason.LENGTH
        return None if reason is None else self.completed(reason)

    def aborted(self) -> Completion:
        return self.completed(StopReason.ABORTED)

    def completed(
        self, reason: StopReason, *, stop_text: str | None = None, num_cached_tokens: int = 0
    ) -> Completion:
        """Everything that was recorded, of all attempts."""
        with self._lock:
            whole = together(self._done + self._now)
        return Completion(
            request_id=self.request.id,
            stop_reason=reason,
            stop_text=stop_text,
            num_cached_tokens=num_cached_tokens,
            **whole,
        )

    def finish(self, outcome: Completion | BaseException) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
