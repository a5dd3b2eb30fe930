"""The parent side of a replica: an Engine whose work happens in a child process (see replica_process.py).

Everything that the child does not answer any more ends in PeerDiedError: requests in flight, calls, and what comes
after. The router turns that into a retry elsewhere.

    any thread ──▶ outgoing ──▶ writer thread ──pipe──▶ child        so that nobody waits for a child that has stopped
    any thread ◀── futures  ◀── reader thread ◀──pipe── child        reading, and a health check's deadline holds
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from rill.config import PartConfig
from rill.errors import EngineError, PeerDiedError, StuckError
from rill.inference.base import (
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.checkpoint import Checkpoint
from rill.inference.replica_outbox import RECORD_WAIT_S, End
from rill.inference.replica_process import EngineFacts, replica_main
from rill.inference.requests import check_ids, wait_for_all
from rill.runtime.process.scratch import ScratchFolder
from rill.types import Floats, PolicyVersion, TokenIds

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 120.0
_UPDATE_TIMEOUT_S = 1800.0


class ReplicaEngine:
    """Starts the child at construction and returns when its engine is loaded."""

    def __init__(
        self,
        config: PartConfig,
        *,
        name: str,
        environment: dict[str, str] | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=replica_main,
            args=(child_end, config.model_dump(mode="json"), environment or {}),
            name=name,
            daemon=True,
        )
        self._process.start()
        child_end.close()
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._flights: dict[str, tuple[Future[Completion], Callable[[Delta], None] | None]] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._is_dead = False
        self._facts = self._await_ready(start_timeout_s)
        self._version = self._facts.version
        self._adapters: frozenset[str] = frozenset()
        threading.Thread(target=self._read, name=f"{name}-reader", daemon=True).start()
        threading.Thread(target=self._write, name=f"{name}-writer", daemon=True).start()

    @property
    def features(self) -> frozenset[Feature]:
        return self._facts.features

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def max_context(self) -> int:
        return self._facts.max_context

    @property
    def vocab_size(self) -> int | None:
        return self._facts.vocab_size

    @property
    def adapters(self) -> frozenset[str]:
        return self._adapters

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        return self.submit_recorded(requests, on_delta, is_streamed=on_delta is not None)

    def submit_recorded(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None, *, is_streamed: bool
    ) -> list[Future[Completion]]:
        """on_delta without streaming hears of tokens late and in bulk: enough to continue from."""
        if not is_streamed:
            requests = [replace(request, delta_interval_s=RECORD_WAIT_S) for request in requests]
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._lock:
            self._check_alive()
            check_ids([request.id for request in requests], self._flights)
            for request, future in zip(requests, futures, strict=True):
                self._flights[request.id] = (future, on_delta)
        self._send(("submit", list(requests), is_streamed))
        return futures

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        return wait_for_all(
            self.submit(requests),
            timeout_s,
            what=f"{self.name}: generate",
            abort=lambda: self.abort([r.id for r in requests]),
        )

    def score(
        self,
        sequences: Sequence[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        options = {} if adapter is None else {"adapter": adapter}
        scores: list[Floats] = self._call(
            "score", timeout_s, list(sequences), temperature, timeout_s, **options
        )
        return scores

    def embed(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        found: list[Floats] = self._call("embed", timeout_s, list(sequences), timeout_s)
        return found

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._call("abort", _CALL_TIMEOUT_S, None if request_ids is None else list(request_ids))

    def abort_soon(self, request_ids: Sequence[str]) -> None:
        """As `abort`, without waiting until it is done."""
        self._send(("call", next(self._call_ids), "abort", (list(request_ids),), {}))

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        self._call("pause", timeout_s + 5.0, mode, timeout_s)

    def resume(self) -> None:
        self._call("resume", _CALL_TIMEOUT_S)

    def release(self, level: MemoryLevel) -> None:
        self._call("release", _UPDATE_TIMEOUT_S, level)

    def restore(self) -> None:
        self._call("restore", _UPDATE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        if isinstance(tensors, Checkpoint):
            self._update(tensors, version, partial)
            return
        with ScratchFolder("weights") as spill:
            self._update(Checkpoint.write(tensors, spill.path / "weights"), version, partial)

    def load_adapter(self, name: str, source: str | Path) -> None:
        self._call("load_adapter", _UPDATE_TIMEOUT_S, name, str(source))
        self._adapters |= {name}

    def unload_adapter(self, name: str) -> None:
        self._call("unload_adapter", _CALL_TIMEOUT_S, name)
        self._adapters -= {name}

    def flush(self) -> None:
        self._call("flush", _CALL_TIMEOUT_S)

    def stats(self) -> EngineStats:
        stats: EngineStats = self._call("stats", 30.0)
        return stats

    def ping(self, timeout_s: float) -> EngineStats:
        """stats() with a deadline of its own, for health checks."""
        stats: EngineStats = self._call("stats", timeout_s)
        return stats

    def kill(self) -> None:
        """End the process now; requests in flight end in PeerDiedError."""
        self._process.kill()

    def close(self) -> None:
        try:
            self._send(("close",))
        except PeerDiedError:
            return
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)

    def _update(self, checkpoint: Checkpoint, version: PolicyVersion, partial: bool) -> None:
        self._call("update_weights", _UPDATE_TIMEOUT_S, checkpoint, version, partial=partial)

    def _await_ready(self, timeout_s: float) -> EngineFacts:
        try:
            if not self._connection.poll(timeout_s):
                self._process.kill()
                raise StuckError(f"{self.name}: the engine was not loaded within {timeout_s} s")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerDiedError(f"{self.name}: the process ended while loading its engine") from error
        match message:
            case ("ready", EngineFacts() as facts):
                return facts
            case ("failed", reason):
                self._process.join(10.0)
                raise EngineError(f"{self.name}: the engine could not be loaded: {reason}")
        raise AssertionError(f"a replica's first message was {message[0]!r}")

    def _call(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        call_id = next(self._call_ids)
        future: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            self._calls[call_id] = future
        self._send(("call", call_id, method, args, kwargs))
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise StuckError(f"{self.name}: {method} was not answered within {timeout_s} s") from None
        finally:
            with self._lock:
                self._calls.pop(call_id, None)

    def _send(self, message: tuple[Any, ...]) -> None:
        """Does not wait. What a dead child does not get any more ends with its death."""
        self._check_alive()
        self._outgoing.put(bytes(ForkingPickler.dumps(message)))

    def _check_alive(self) -> None:
        if self._is_dead:
            raise PeerDiedError(f"{self.name} (process {self.pid}) is gone")

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                return  # the child is gone: the reader finds out too

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                match message:
                    case ("news", packed, ends):
                        self._on_news([] if packed is None else packed.unpack(), ends)
                    case ("result", call_id, error, value, version):
                        self._on_result(call_id, error, value, version)
        except (EOFError, OSError):
            pass
        finally:
            self._outgoing.put(None)
            self._on_death()

    def _on_news(self, deltas: list[Delta], ends: list[End]) -> None:
        for delta in deltas:
            with self._lock:
                flight = self._flights.get(delta.request_id)
            if flight is not None and flight[1] is not None:
                self._tell(flight[1], delta)
        for end in ends:
            request_id = end.request_id if isinstance(end, Completion) else end[0]
            with self._lock:
                flight = self._flights.pop(request_id, None)
            if flight is None or not flight[0].set_running_or_notify_cancel():
                continue
            if isinstance(end, Completion):
                flight[0].set_result(end)
            else:
                flight[0].set_exception(end[1])

    def _tell(self, on_delta: Callable[[Delta], None], delta: Delta) -> None:
        try:
            on_delta(delta)
        except Exception:  # boundary: a caller's own code; the reader serves every request
            log.exception("%s: on_delta of request %s failed", self.name, delta.request_id)

    def _on_result(self, call_id: int, error: Exception | None, value: Any, version: int) -> None:
        with self._lock:
            self._version = PolicyVersion(version)
            future = self._calls.get(call_id)
        if future is None:
            return  # it gave up waiting
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def _on_death(self) -> None:
        with self._lock:
            self._is_dead = True
            flights, self._flights = self._flights, {}
            calls, self._calls = dict(self._calls), {}
        error = PeerDiedError(f"{self.name} (process {self.pid}) died")
        for future in [*calls.values(), *(future for future, _ in flights.values())]:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
