"""An answer that was cut off and goes on later: the request that continues it, and the two parts as one.

Tokens, log-probabilities and versions of both parts stay as they were sampled: the answer tells for every token which
policy made it. A `Flight` is one request on its way, over interruptions and the death of replicas.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from rill.inference.base import Completion, Delta, Request, TopTokens
from rill.types import StopReason, TokenIds

log = logging.getLogger(__name__)

Decode = Callable[[TokenIds], str]


def rest_of(request: Request, said: TokenIds) -> Request:
    """The same request behind what was said to it, which counts towards its limits."""
    sampling, num_said = request.sampling, len(said)
    assert num_said < sampling.max_new_tokens, f"{request.id} had reached its limit when it was cut off"
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, said]),
        num_generated=request.num_generated + num_said,
        sampling=replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens - num_said,
            min_new_tokens=max(0, sampling.min_new_tokens - num_said),
        ),
    )


def reseeded(request: Request) -> Request:
    """For an engine that counts its draws from the start of a request: it would draw the same numbers again behind a
    part that was sampled before."""
    sampling = request.sampling
    if request.num_generated == 0 or sampling.seed is None:
        return request
    seed = hashed(f"{sampling.seed}+{request.num_generated}")
    return replace(request, sampling=replace(sampling, seed=seed))


def hashed(text: str) -> int:
    """A seed."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def joined(before: Completion, after: Completion, stop: Sequence[str], decode: Decode) -> Completion:
    """Both parts as one answer, ended where the engine would have ended it in one go."""
    whole = replace(after, **together([before, after]))
    return _ended_at(whole, len(before.token_ids), stop, decode) if stop else whole


def together(parts: Sequence[Delta | Completion]) -> dict[str, Any]:
    """The tokens of the parts with all that belongs to them, one after the other; fields of a Completion."""
    kinds = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
    found: dict[str, Any] = {
        name: np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in parts)], dtype=kind)
        for name, kind in kinds.items()
    }
    found["top"] = TopTokens.joined(part.top for part in parts)
    return found | {"routed_experts": _joined_experts(parts)}


def _joined_experts(parts: Sequence[Delta | Completion]) -> Any:
    """[T, L, K] of the sampled tokens alone, each as the pass that sampled it chose; -1 where a part has none."""
    known = [None if isinstance(part, Delta) else part.routed_experts for part in parts]
    shape = next((experts.shape[1:] for experts in known if experts is not None), None)
    if shape is None:
        return None
    rows = []
    for part, experts in zip(parts, known, strict=True):
        count = len(part.token_ids)
        unknown = np.full((count, *shape), -1, np.int16)
        # The prompt's rows, where there are any, come first.
        rows.append(unknown if experts is None else experts[len(experts) - count :])
    return np.concatenate(rows, dtype=np.int16, casting="unsafe")


def _ended_at(whole: Completion, num_before: int, stop: Sequence[str], decode: Decode) -> Completion:
    """A stop string may begin in the first part and end in the second, where the engine does not see it."""

    def found(length: int) -> str | None:
        text = decode(whole.token_ids[:length])
        return next((each for each in stop if each in text), None)

    total = len(whole.token_ids)
    end = bisect_left(range(total + 1), True, lo=num_before, key=lambda length: found(length) is not None)
    if end >= total:  # not there, or at the very end: the engine has seen it, or the last token completes it
        text = found(total)
        return whole if text is None else replace(whole, stop_reason=StopReason.STOP, stop_text=text)
    return replace(
        whole,
        **whole.part(end=end),
        routed_experts=None if whole.routed_experts is None else whole.routed_experts[:end],
        stop_reason=StopReason.STOP,
        stop_text=found(end),
    )


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
            except Exception:  # boundary: a caller's own code; its request and the engine go on
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
