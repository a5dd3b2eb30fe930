"""A replica: a worker of the runtime with one engine in it, and the driver's side of it.

    any thread ──▶ submit ──▶ sender thread ──▶ worker, main thread ──▶ engine    what comes meanwhile travels together
    any thread ──▶ abort  ────────────────────▶ worker, main thread ──▶ engine    never overtakes a submit
    any thread ──▶ call   ──▶ act(method, …), beside them, a thread each ──▶ (error, value, version)
    router     ◀── on_news, on_death ◀── reader thread ◀── news(wait_s): all since the last time, packed ◀── Outbox

Nobody waits for a worker that has stopped reading. Deltas of requests that are not streamed travel too, more rarely
(Request.delta_interval_s): they are what a retry continues from when the process dies. It ends itself when its engine
has failed for good. Everything that it does not answer any more ends in PeerDiedError, which the router turns into a
retry elsewhere.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rill.config import PartConfig
from rill.errors import EngineDiedError, EngineError, PeerDiedError, RillError, StuckError, WorkerError
from rill.inference.base import ENGINES, Completion, Delta, Engine, Feature, Request, TopTokens
from rill.inference.commands import CONTROL_TIMEOUT_S
from rill.runtime.worker import Worker, concurrent
from rill.types import Floats, Ints, PolicyVersion, StopReason, TokenIds

if TYPE_CHECKING:
    from rill.runtime.cluster import Cluster
    from rill.runtime.device.placement import Placement

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEWS_WAIT_S = 10.0
_COMPANY_WAIT_S = 0.002
"""How long news wait for more of their kind, and requests behind others."""
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread that takes requests or packs news may keep the engine's from the interpreter. Python's own 5 ms are
the time of two steps, and every launch gives the interpreter away."""

End = Completion | tuple[str, Exception]
"""How a request ended: with a completion, or (its id, why not)."""


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
    def pack(cls, deltas: Sequence[Delta] | Sequence[Completion]) -> PackedDeltas | None:
        """Deltas of one request become one. None where there are none."""
        by_request: dict[str, list[Delta | Completion]] = {}
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

    def unpack(self, kind: Callable[..., T]) -> list[T]:
        found, start = [], 0
        for request_id, length, reason in zip(self.request_ids, self.lengths, self.stop_reasons, strict=True):
            part = slice(start, start + length)
            start += length
            found.append(
                kind(
                    request_id=request_id,
                    token_ids=self.token_ids[part],
                    logprobs=self.logprobs[part],
                    versions=self.versions[part],
                    stop_reason=reason,
                    top=self.tops.get(request_id),
                )
            )
        return found


@dataclass(frozen=True, slots=True)
class PackedEnds:
    """How requests ended: their completions packed alike, and what few of those have beside their tokens."""

    tokens: PackedDeltas | None
    rests: list[dict[str, Any]]
    failures: list[tuple[str, Exception]]

    @classmethod
    def pack(cls, ends: Sequence[End]) -> PackedEnds:
        done = [end for end in ends if isinstance(end, Completion)]
        failures = [end for end in ends if not isinstance(end, Completion)]
        return cls(PackedDeltas.pack(done), [_rest(end) for end in done], failures)

    def unpack(self) -> list[End]:
        done = [] if self.tokens is None else self.tokens.unpack(Completion)
        whole = [replace(end, **rest) if rest else end for end, rest in zip(done, self.rests, strict=True)]
        return [*whole, *self.failures]


def _rest(end: Completion) -> dict[str, Any]:
    found = {"stop_text": end.stop_text, "routed_experts": end.routed_experts}
    found = {name: value for name, value in found.items() if value is not None}
    return found | {"num_cached_tokens": end.num_cached_tokens} if end.num_cached_tokens else found


class Outbox:
    """What the engine's thread reports, until it is asked for. The engine has gathered a request's tokens already."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news: list[Delta | End] = []

    def add(self, news: Delta | End) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify()

    def take(self, wait_s: float) -> tuple[PackedDeltas | None, PackedEnds | None]:
        """Everything since the last time; nothing where nothing came within the time. Deltas come before ends."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._news, wait_s):
                return None, None
        time.sleep(_COMPANY_WAIT_S)
        with self._changed:
            news, self._news = self._news, []
        deltas = [each for each in news if isinstance(each, Delta)]
        ends = [each for each in news if not isinstance(each, Delta)]
        return PackedDeltas.pack(deltas), PackedEnds.pack(ends) if ends else None


class Replica(Worker):
    """In the worker's process."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Build the engine that the configuration names."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        part = ENGINES.load(config["type"])
        self._engine: Engine = part(part.Config.model_validate(config))
        self._outbox = Outbox()

    @concurrent
    def facts(self) -> tuple[frozenset[Feature], int, int | None, PolicyVersion]:
        """What the driver answers for the engine without asking it again."""
        engine = self._engine
        return engine.features, engine.max_context, engine.vocab_size, engine.version

    def submit(self, requests: Sequence[Request]) -> None:
        try:
            futures = self._engine.submit(requests, self._outbox.add)
        except Exception as error:  # noqa: BLE001 boundary: nobody waits for this call, those who asked must hear of it
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
    def news(self, wait_s: float) -> tuple[PackedDeltas | None, PackedEnds | None]:
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


class ReplicaProcess:
    """In the driver: launches the worker at construction and returns when its engine is loaded.

    On the reader's thread, `on_news` hears of tokens and ends, and `on_death`, once and last, why there is no more.
    """

    def __init__(
        self,
        config: PartConfig,
        *,
        cluster: Cluster,
        name: str,
        placement: Placement,
        start_timeout_s: float,
        on_news: Callable[[list[Delta], list[End]], None],
        on_death: Callable[[ReplicaProcess, PeerDiedError], None],
    ) -> None:
        self.name = name
        self._on_news, self._on_death = on_news, on_death
        try:
            self._group = Replica.launch(
                cluster,
                name=name,
                placement=placement,
                launch_timeout_s=start_timeout_s,
                config=config.model_dump(mode="json"),
            )
        except WorkerError as error:
            raise EngineError(f"{name}: the engine could not be loaded: {error}") from error
        try:
            facts = self._group.facts().wait(CONTROL_TIMEOUT_S)[0]
        except RillError:
            self._group.close(timeout_s=0.0)  # it must not keep a device's memory
            raise
        self.pid = self._group.addresses()[0].pid
        self.features, self.max_context, self.vocab_size, self.version = facts
        self.num_in_flight = 0
        """Kept by the router."""
        self.is_dead = False
        self._outgoing: deque[Request] = deque()
        self._has_outgoing = threading.Event()
        self._sending = threading.Lock()
        threading.Thread(target=self._send, name=f"{name}-sender", daemon=True).start()
        threading.Thread(target=self._read, name=f"{name}-reader", daemon=True).start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Returns at once. A message for each request would cost an event loop as much as the request's JSON."""
        self._check_alive()
        self._outgoing.extend(requests)
        if not self._has_outgoing.is_set():
            self._has_outgoing.set()

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """Returns at once. Not as a `call`: it must not overtake what was submitted before it."""
        self._check_alive()
        with self._sending:
            self._send_outgoing()
            self._group.abort(None if request_ids is None else list(request_ids))

    def call(self, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S, **kwargs: Any) -> Any:
        """A method of the engine there, beside whatever else it does."""
        self._check_alive()
        handle = self._group.act(method, args, kwargs)
        if not handle.ended(timeout_s):
            raise StuckError(f"{self.name}: {method} was not answered within {timeout_s} s")
        error, value, version = handle.wait(0.0)[0]
        self.version = PolicyVersion(version)
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """End the process now. Nobody calls it any more; `on_death` follows."""
        self.is_dead = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._group.close(timeout_s=10.0)

    def _send(self) -> None:
        while not self.is_dead:
            self._has_outgoing.wait(_NEWS_WAIT_S)
            self._has_outgoing.clear()
            with self._sending, suppress(RillError):  # it died: the reader tells of it
                self._send_outgoing()
            time.sleep(_COMPANY_WAIT_S)  # the first does not wait; those behind it travel together

    def _send_outgoing(self) -> None:
        requests = []
        while self._outgoing:
            requests.append(self._outgoing.popleft())
        if requests:
            self._group.submit(requests)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise PeerDiedError(f"{self.name} (process {self.pid}) is gone")

    def _read(self) -> None:
        try:
            while True:
                handle = self._group.news(_NEWS_WAIT_S)
                while not handle.ended(CONTROL_TIMEOUT_S):
                    pass  # a worker that hangs is the health check's affair
                packed, ends = handle.wait(0.0)[0]
                deltas = [] if packed is None else packed.unpack(Delta)
                self._on_news(deltas, [] if ends is None else ends.unpack())
        except RillError as error:  # it died, or was closed
            self.is_dead = True
            self._has_outgoing.set()  # the sender ends
            self._on_death(self, PeerDiedError(f"{self.name} (process {self.pid}) died: {error}"))
        with suppress(RillError):
            self._group.close(timeout_s=0.0)
