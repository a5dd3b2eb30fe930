"""The one door by which tokens leave the engine: streams, completions, scores, failures.

Called by the engine's thread alone, once a step, after the sequences hold their new tokens and before anybody outside
has seen one. Whatever must know of every token first (a write-ahead log, say) extends it.

Request ids are taken here too, by the callers' threads: an id is in use from submit() until its end was delivered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from rill.errors import EngineError
from rill.inference.base import Delta
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.inference.requests import check_ids
from rill.types import StopReason

logger = logging.getLogger(__name__)


News = tuple[Sequence, StopReason | None]
"""A sequence with tokens that were not yet delivered; with a reason, one that has ended."""


class Outlet:
    """To the callers: on_delta, and the futures that submit() and score() wait for."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._lock = threading.Lock()

    def take_ids(self, ids: Iterable[str]) -> None:
        """Callers' threads. RequestError when two are the same or one is in use."""
        given = list(ids)
        with self._lock:
            check_ids(given, self._ids)
            self._ids.update(given)

    def deliver(self, news: Iterable[News]) -> None:
        """All that one step brought. seq.num_reported tells how many of a streamed sequence's tokens are out."""
        now = time.monotonic()
        for seq, reason in news:
            if seq.on_delta is not None and (reason is not None or now >= seq.next_delta_at):
                seq.next_delta_at = now + seq.request.delta_interval_s
                self._tell(seq, seq.take_delta(reason))
            if reason is not None:
                with self._lock:
                    self._ids.discard(seq.id)
                if seq.future.set_running_or_notify_cancel():
                    seq.future.set_result(seq.completion(reason))

    def score(self, seq: ScoredSequence) -> None:
        """All of its scores are known."""
        seq.future.set_result(seq.scores)

    def abort(self, seq: Sequence, reason: str) -> None:
        """It ends with the tokens so far; what was scored, without a result."""
        if seq.is_scored:
            self.fail(seq, EngineError(reason))
        else:
            self.deliver([(seq, StopReason.ABORTED)])

    def fail(self, seq: Sequence, error: BaseException) -> None:
        """It ends without a result."""
        with self._lock:
            self._ids.discard(seq.id)
        if not seq.future.done() and seq.future.set_running_or_notify_cancel():
            seq.future.set_exception(error)

    def _tell(self, seq: Sequence, delta: Delta) -> None:
        assert seq.on_delta is not None
        try:
            seq.on_delta(delta)
        except Exception:  # boundary: a caller's own code; neither its request nor the engine ends with it
            logger.exception("on_delta of request %s failed and will not be called again", seq.id)
            seq.on_delta = None
