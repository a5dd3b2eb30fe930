"""The worker of a replica: one process of the runtime, one engine.

    driver ──▶ submit, abort   in order, on the main thread ──▶ engine ──▶ deltas, ends ──▶ Outbox
           ──▶ news(wait_s)    asked again and again        ◀── everything since the last time, packed
           ──▶ act(method, …)  beside them, a thread each   ──▶ (error, value, version)

Deltas of requests that are not streamed travel too, more rarely (Request.delta_interval_s): they are what a retry
continues from when this process dies. It ends itself when its engine has failed for good: its requests then go on
elsewhere, and the driver starts another.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rill.errors import EngineDiedError, EngineError, RillError
from rill.inference.base import ENGINES, Completion, Delta, Engine, Feature, Request, TopTokens
from rill.runtime.worker import Worker, concurrent
from rill.types import Floats, Ints, PolicyVersion, StopReason, TokenIds

log = logging.getLogger(__name__)

_COMPANY_WAIT_S = 0.002
"""How long news wait for more of their kind."""
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread that takes requests or packs news may keep the engine's from the interpreter. Python's own 5 ms are
the time of two steps, and every launch gives the interpreter away."""

End = Completion | tuple[str, Exception]
"""How a request ended: with a completion, or (its id, why not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the driver answers for the engine without asking it again."""

    features: frozenset[Feature]
    max_context: int
    vocab_size: int | None
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDeltas:
    """One delta for each of several requests, their tokens one after the other: pickling three small arrays for each
    token costs more than making it."""

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
    """What the engine's thread reports, until it is asked for. The engine has gathered a request's tokens already."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news: list[Delta | End] = []

    def add(self, news: Delta | End) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify()

    def take(self, wait_s: float) -> tuple[PackedDeltas | None, list[End]]:
        """Everything since the last time; nothing where nothing came within the time. Deltas come before ends."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._news, wait_s):
                return None, []
        time.sleep(_COMPANY_WAIT_S)
        with self._changed:
            news, self._news = self._news, []
        deltas = [each for each in news if isinstance(each, Delta)]
        return PackedDeltas.pack(deltas), [each for each in news if not isinstance(each, Delta)]


class Replica(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        """Build the engine that the configuration names."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        part = ENGINES.load(config["type"])
        self._engine: Engine = part(part.Config.model_validate(config))
        self._outbox = Outbox()

    @concurrent
    def facts(self) -> EngineFacts:
        engine = self._engine
        return EngineFacts(
            features=engine.features,
            max_context=engine.max_context,
            vocab_size=engine.vocab_size,
            version=engine.version,
        )

    def submit(self, requests: Sequence[Request]) -> None:
        try:
            futures = self._engine.submit(requests, self._outbox.add)
        except RillError as error:
            if len(requests) > 1:  # the others, of other clients perhaps, are not to blame
                for request in requests:
                    self.submit([request])
            else:
                self._outbox.add((requests[0].id, _portable(error)))
            return
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(partial(self._end, request.id))

    def _end(self, request_id: str, future: Future[Completion]) -> None:
        error = future.exception()
        self._outbox.add(future.result() if error is None else (request_id, _portable(error)))

    def abort(self, request_ids: list[str] | None) -> None:
        """Not beside `submit`: it must not overtake one."""
        self._engine.abort(request_ids)

    @concurrent
    def news(self, wait_s: float) -> tuple[PackedDeltas | None, list[End]]:
        return self._outbox.take(wait_s)

    @concurrent
    def act(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Exception | None, Any, int]:
        try:
            value = getattr(self._engine, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - boundary: the error belongs to the caller in the driver
            return _portable(error), None, int(self._engine.version)
        return None, value, int(self._engine.version)

    def close(self) -> None:
        self._engine.close()


def _portable(error: BaseException) -> Exception:
    """RillErrors of one argument pickle; anything else becomes text. With a dead engine this process is of no more use:
    the driver hears of it as of any other death."""
    if isinstance(error, EngineDiedError):
        log.error("the replica ends, because its engine did: %s", error)
        os._exit(1)
    if isinstance(error, RillError) and len(error.args) == 1:
        return error
    return EngineError(f"{type(error).__name__}: {error}")
