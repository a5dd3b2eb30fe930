"""The child side of a replica: one process, one engine, one pipe.

    parent ──▶ ("submit", requests, is_streamed) ──▶ engine.submit           │ news, batched:
           ──▶ ("call", id, method, args, kwargs)──▶ a thread ──▶ ("result")  │ ("news", deltas, ends)
           ◀───────────────────────────────────────────────────────────────────┘

Deltas of requests that are not streamed travel too, more rarely: they are what a retry continues from when this
process dies. The child ends when the pipe closes, so it cannot outlive its parent.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rill.errors import EngineError, RillError
from rill.inference.base import ENGINES, Completion, Delta, Engine, Feature, Request
from rill.types import PolicyVersion

log = logging.getLogger(__name__)

_STREAM_WAIT_S = 0.002
"""How long a streamed delta may wait for company."""
_RECORD_WAIT_S = 0.1
"""How long a delta that nobody streams may wait: at most this much work is lost with the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the parent answers for the engine without asking it again."""

    features: frozenset[Feature]
    max_context: int
    vocab_size: int | None
    version: PolicyVersion

    @classmethod
    def of(cls, engine: Engine) -> EngineFacts:
        return cls(
            features=engine.features,
            max_context=engine.max_context,
            vocab_size=engine.vocab_size,
            version=engine.version,
        )


End = Completion | tuple[str, Exception]
"""How a request ended: with a completion, or (its id, why not)."""


def replica_main(connection: Connection, config: dict[str, Any], environment: dict[str, str]) -> None:
    """Build the engine that the configuration names and serve it until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.environ.update(environment)
    try:
        part = ENGINES.load(config["type"])
        engine: Engine = part(part.Config.model_validate(config))
    except Exception as error:  # noqa: BLE001 - boundary: the parent reports what kept the engine from starting
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", EngineFacts.of(engine)))
    outbox = _Outbox(connection)
    calls = ThreadPoolExecutor(max_workers=8, thread_name_prefix="replica-call")
    is_closed = _serve(connection, engine, outbox, calls)
    calls.shutdown(wait=False, cancel_futures=True)
    if not is_closed:
        os._exit(1)  # the parent is gone: an engine's threads must not hold a process that nobody speaks to


def _serve(connection: Connection, engine: Engine, outbox: _Outbox, calls: ThreadPoolExecutor) -> bool:
    """Whether the end was asked for."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return False
        match message:
            case ("submit", requests, is_streamed):
                _submit(engine, outbox, requests, is_streamed)
            case ("call", call_id, method, args, kwargs):
                calls.submit(_call, engine, outbox, call_id, method, args, kwargs)
            case ("close",):
                engine.close()
                return True


def _submit(engine: Engine, outbox: _Outbox, requests: Sequence[Request], is_streamed: bool) -> None:
    on_delta = outbox.add_streamed if is_streamed else outbox.add_recorded
    try:
        futures = engine.submit(requests, on_delta)
    except RillError as error:
        if len(requests) > 1:  # the others, of other clients perhaps, are not to blame
            for request in requests:
                _submit(engine, outbox, [request], is_streamed)
        else:
            outbox.add_end((requests[0].id, _portable(error)))
        return
    for request, future in zip(requests, futures, strict=True):
        future.add_done_callback(_Ending(outbox, request.id))


class _Ending:
    def __init__(self, outbox: _Outbox, request_id: str) -> None:
        self._outbox, self._request_id = outbox, request_id

    def __call__(self, future: Future[Completion]) -> None:
        error = future.exception()
        if error is None:
            self._outbox.add_end(future.result())
        else:
            self._outbox.add_end((self._request_id, _portable(error)))


def _call(
    engine: Engine, outbox: _Outbox, call_id: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        value = getattr(engine, method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - boundary: the error belongs to the caller in the parent
        outbox.send(("result", call_id, _portable(error), None, int(engine.version)))
        return
    outbox.send(("result", call_id, None, value, int(engine.version)))


def _portable(error: BaseException) -> Exception:
    """RillErrors of one argument pickle; anything else becomes text."""
    if isinstance(error, RillError) and len(error.args) == 1:
        return error
    return EngineError(f"{type(error).__name__}: {error}")


class _Outbox:
    """Collects what the engine reports and sends it in batches from one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._news = threading.Condition()
        self._streamed: list[Delta] = []
        self._recorded: list[Delta] = []
        self._ends: list[End] = []
        threading.Thread(target=self._flush_forever, name="replica-outbox", daemon=True).start()

    def add_streamed(self, delta: Delta) -> None:
        with self._news:
            self._streamed.append(delta)
            self._news.notify()

    def add_recorded(self, delta: Delta) -> None:
        with self._news:
            self._recorded.append(delta)

    def add_end(self, end: End) -> None:
        with self._news:
            self._ends.append(end)
            self._news.notify()

    def send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            return  # the parent is gone; the receive loop ends this process

    def _flush_forever(self) -> None:
        while True:
            with self._news:
                if not self._streamed and not self._ends:
                    self._news.wait(timeout=_RECORD_WAIT_S)
            time.sleep(_STREAM_WAIT_S)
            with self._news:
                streamed, self._streamed = self._streamed, []
                recorded, self._recorded = self._recorded, []
                ends, self._ends = self._ends, []
            if streamed or recorded or ends:
                finished = {end.request_id for end in ends if isinstance(end, Completion)}
                # A completion holds all its tokens: what was only recorded need not travel again.
                recorded = [delta for delta in recorded if delta.request_id not in finished]
                self.send(("news", merge_deltas(streamed + recorded), ends))


def merge_deltas(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta for each request."""
    by_request: dict[str, list[Delta]] = {}
    for delta in deltas:
        by_request.setdefault(delta.request_id, []).append(delta)
    return [
        parts[0]
        if len(parts) == 1
        else Delta(
            request_id=request_id,
            token_ids=np.concatenate([p.token_ids for p in parts]),
            logprobs=np.concatenate([p.logprobs for p in parts]),
            versions=np.concatenate([p.versions for p in parts]),
            stop_reason=parts[-1].stop_reason,
        )
        for request_id, parts in by_request.items()
    ]
