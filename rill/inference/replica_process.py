"""The child side of a replica: one process, one engine, one pipe.

    parent ──▶ ("submit", requests, is_streamed) ──▶ engine.submit ──▶ replica_outbox.py ──▶ ("news", deltas, ends)
           ──▶ ("call", id, method, args, kwargs)──▶ a thread      ──▶ ("result", id, error, value, version)

Deltas of requests that are not streamed travel too, more rarely: they are what a retry continues from when this
process dies. The child ends when the pipe closes, so it cannot outlive its parent, and when its engine has failed for
good: its requests then go on elsewhere, and the parent starts another.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rill.errors import EngineDiedError, EngineError, RillError
from rill.inference.base import ENGINES, Completion, Engine, Feature, Request
from rill.inference.replica_outbox import Outbox
from rill.types import PolicyVersion

log = logging.getLogger(__name__)

_MAX_CALLS = 64
"""At one time; scoring and pauses last, and those behind them wait."""


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
    outbox = Outbox(connection)
    calls = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="replica-call")
    checks = ThreadPoolExecutor(1, thread_name_prefix="replica-check")
    is_closed = _serve(connection, engine, outbox, calls, checks)
    for pool in (calls, checks):
        pool.shutdown(wait=False, cancel_futures=True)
    if not is_closed:
        os._exit(1)  # the parent is gone: an engine's threads must not hold a process that nobody speaks to


def _serve(
    connection: Connection,
    engine: Engine,
    outbox: Outbox,
    calls: ThreadPoolExecutor,
    checks: ThreadPoolExecutor,
) -> bool:
    """Whether the end was asked for. Health checks have a thread of their own: they must not wait behind calls that
    last, or a busy engine would be taken for a dead one."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return False
        match message:
            case ("submit", requests, is_streamed):
                _submit(engine, outbox, requests, is_streamed)
            case ("call", call_id, method, args, kwargs):
                pool = checks if method == "stats" else calls
                pool.submit(_call, engine, outbox, call_id, method, args, kwargs)
            case ("close",):
                engine.close()
                return True


def _submit(engine: Engine, outbox: Outbox, requests: Sequence[Request], is_streamed: bool) -> None:
    on_delta = outbox.add_streamed if is_streamed else outbox.add_recorded
    try:
        futures = engine.submit(requests, on_delta)
    except RillError as error:
        _end_with(error)
        if len(requests) > 1:  # the others, of other clients perhaps, are not to blame
            for request in requests:
                _submit(engine, outbox, [request], is_streamed)
        else:
            outbox.add_end((requests[0].id, _portable(error)))
        return
    for request, future in zip(requests, futures, strict=True):
        future.add_done_callback(_Ending(outbox, request.id))


class _Ending:
    def __init__(self, outbox: Outbox, request_id: str) -> None:
        self._outbox, self._request_id = outbox, request_id

    def __call__(self, future: Future[Completion]) -> None:
        error = future.exception()
        if error is None:
            self._outbox.add_end(future.result())
        else:
            _end_with(error)
            self._outbox.add_end((self._request_id, _portable(error)))


def _call(
    engine: Engine, outbox: Outbox, call_id: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        value = getattr(engine, method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - boundary: the error belongs to the caller in the parent
        _end_with(error)
        outbox.send(("result", call_id, _portable(error), None, int(engine.version)))
        return
    outbox.send(("result", call_id, None, value, int(engine.version)))


def _end_with(error: BaseException) -> None:
    """The engine is dead, and this process is of no more use: the parent hears of it as of any other death."""
    if isinstance(error, EngineDiedError):
        log.error("the replica ends, because its engine did: %s", error)
        os._exit(1)


def _portable(error: BaseException) -> Exception:
    """RillErrors of one argument pickle; anything else becomes text."""
    if isinstance(error, RillError) and len(error.args) == 1:
        return error
    return EngineError(f"{type(error).__name__}: {error}")
