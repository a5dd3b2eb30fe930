"""An engine that can be told to stop and goes on later: how rollout workers see theirs.

What is stopped is answered as ABORTED with the tokens so far, and can be continued (rill.inference.continued).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rill.inference.base import Completion, Delta, Engine, Feature, Request
from rill.inference.continued import nothing_said
from rill.telemetry import trace

T = TypeVar("T")


class EngineGate:
    """An engine that can be told to stop: what runs is aborted, and what is asked later for that epoch is not begun.

    `submit` and `stop` are called by different threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._stopped_through = -1
        self._running: dict[str, int] = {}
        """Request id -> epoch."""
        self._busy: trace.Span | None = None
        """Open while anything is asked of the engine."""
        self._marking = threading.Lock()

    def submit(
        self, requests: Sequence[Request], epoch: int, on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        with self._lock:
            if epoch <= self._stopped_through:
                return [answered(nothing_said(request)) for request in requests]
            if Feature.SEEDED_BY_POSITION not in self._engine.features:
                requests = [_reseeded(request) for request in requests]
            begun = {request.id: epoch for request in requests if request.id not in self._running}
            self._running |= begun  # before any of them can end
            self._mark()
            try:
                futures = self._engine.submit(requests, on_delta)
            except BaseException:
                for name in begun:
                    del self._running[name]
                self._mark()
                raise
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(partial(self._forget, request.id))
        return futures

    def stop(self, epoch: int) -> None:
        """Everything of this epoch and those before it."""
        with self._lock:
            self._stopped_through = max(self._stopped_through, epoch)
            stopped = [name for name, begun in self._running.copy().items() if begun <= epoch]
        if stopped:
            self._engine.abort(stopped)  # outside: it waits for the engine's thread, which calls `_forget`

    def reopen(self) -> None:
        """Epochs are counted from 0 again."""
        with self._lock:
            self._stopped_through = -1

    def _forget(self, name: str, _: Future[Completion]) -> None:
        """By the engine's thread, which waits for nobody here."""
        self._running.pop(name, None)
        if not self._running:
            self._mark()

    def _mark(self) -> None:
        """In the trace, once it begins to run or has ended."""
        with self._marking:
            if self._running and self._busy is None:
                self._busy = trace.span("sampling", lane="engine").__enter__()
            elif not self._running and self._busy is not None:
                self._busy.__exit__(None, None, None)
                self._busy = None


def _reseeded(request: Request) -> Request:
    """An engine that counts its draws from the start of a request would draw the same numbers again behind a part that
    was sampled before."""
    sampling = request.sampling
    if request.num_generated == 0 or sampling.seed is None:
        return request
    digest = hashlib.blake2b(f"{sampling.seed}+{request.num_generated}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return replace(request, sampling=replace(sampling, seed=seed))


def answered(answer: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(answer)
    return future
