"""The driver's side of a replica: an Engine whose work happens in a worker of the runtime (see replica_worker.py).

Everything that the worker does not answer any more ends in PeerDiedError: requests in flight, calls, and what comes
after. The router turns that into a retry elsewhere.

    any thread ──▶ group.submit, group.act ──▶ worker          nobody waits for a worker that has stopped reading
    any thread ◀── futures ◀── reader thread ◀── group.news    asked again as soon as it was answered
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rill.config import PartConfig
from rill.errors import EngineError, PeerDiedError, RillError, StuckError, WorkerError
from rill.inference.base import (
    Completion,
    Delta,
    EngineStats,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.checkpoint import Checkpoint
from rill.inference.commands import CONTROL_TIMEOUT_S, MOVE_TIMEOUT_S
from rill.inference.replica_worker import End, EngineFacts, Replica
from rill.inference.requests import Generates, check_ids
from rill.runtime.cluster import Cluster
from rill.runtime.device.placement import Placement
from rill.runtime.handle import Handle
from rill.runtime.process.scratch import ScratchFolder
from rill.types import Floats, PolicyVersion, TokenIds

log = logging.getLogger(__name__)

RECORD_WAIT_S = 0.1
"""How long tokens that nobody streams may wait: at most this much work is lost with the process."""
_NEWS_WAIT_S = 10.0


class ReplicaEngine(Generates):
    """Launches the worker at construction and returns when its engine is loaded."""

    def __init__(
        self,
        config: PartConfig,
        *,
        cluster: Cluster,
        name: str,
        placement: Placement = 0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.name = name
        try:
            self._group = Replica.launch(
                cluster,
                name=name,
                placement=placement,
                launch_timeout_s=start_timeout_s,
                config=config.model_dump(mode="json"),
            )
            facts: EngineFacts = self._group.facts().wait(CONTROL_TIMEOUT_S)[0]
        except WorkerError as error:
            raise EngineError(f"{name}: the engine could not be loaded: {error}") from error
        self.pid = self._group.addresses()[0].pid
        self.features, self.max_context = facts.features, facts.max_context
        self.vocab_size, self.version = facts.vocab_size, facts.version
        self.adapters: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._flights: dict[str, tuple[Future[Completion], Callable[[Delta], None] | None]] = {}
        self.is_dead = False
        threading.Thread(target=self._read, name=f"{name}-reader", daemon=True).start()

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
        self._group.submit(list(requests))
        return futures

    def score(
        self,
        sequences: Sequence[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        options = {} if adapter is None else {"adapter": adapter}
        scores: list[Floats] = self._act(
            "score", timeout_s, list(sequences), temperature, timeout_s, **options
        )
        return scores

    def embed(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        found: list[Floats] = self._act("embed", timeout_s, list(sequences), timeout_s)
        return found

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._answer(self.abort_soon(request_ids), "abort", CONTROL_TIMEOUT_S)

    def abort_soon(self, request_ids: Sequence[str] | None) -> Handle:
        """As `abort`, without waiting until it is done."""
        self._check_alive()
        handle: Handle = self._group.abort(None if request_ids is None else list(request_ids))
        return handle

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        self._act("pause", timeout_s + 5.0, mode, timeout_s)

    def resume(self) -> None:
        self._act("resume", CONTROL_TIMEOUT_S)

    def release(self, level: MemoryLevel) -> None:
        self._act("release", MOVE_TIMEOUT_S, level)

    def restore(self) -> None:
        self._act("restore", MOVE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        with ScratchFolder("weights") as spill:
            whole = (
                tensors
                if isinstance(tensors, Checkpoint)
                else Checkpoint.write(tensors, spill.path / "weights")
            )
            self._act("update_weights", MOVE_TIMEOUT_S, whole, version, partial=partial)

    def load_adapter(self, name: str, source: str | Path) -> None:
        self._act("load_adapter", MOVE_TIMEOUT_S, name, str(source))
        self.adapters |= {name}

    def unload_adapter(self, name: str) -> None:
        self._act("unload_adapter", CONTROL_TIMEOUT_S, name)
        self.adapters -= {name}

    def rewind(self) -> None:
        self._act("rewind", CONTROL_TIMEOUT_S)

    def flush(self) -> None:
        self._act("flush", CONTROL_TIMEOUT_S)

    def stats(self, timeout_s: float = 30.0) -> EngineStats:
        stats: EngineStats = self._act("stats", timeout_s)
        return stats

    def kill(self) -> None:
        """End the process now; requests in flight end in PeerDiedError."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._group.close(timeout_s=10.0)

    def _act(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        self._check_alive()
        error, value, version = self._answer(self._group.act(method, args, kwargs), method, timeout_s)
        self.version = PolicyVersion(version)
        if error is not None:
            raise error
        return value

    def _answer(self, handle: Handle, method: str, timeout_s: float) -> Any:
        if not handle.ended(timeout_s):
            raise StuckError(f"{self.name}: {method} was not answered within {timeout_s} s")
        return handle.wait(0.0)[0]

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
                self._on_news([] if packed is None else packed.unpack(), ends)
        except RillError as error:  # it died, or was closed
            self._on_death(error)
        with suppress(RillError):
            self._group.close(timeout_s=0.0)

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

    def _on_death(self, reason: RillError) -> None:
        with self._lock:
            self.is_dead = True
            flights, self._flights = self._flights, {}
        for future, _ in flights.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(PeerDiedError(f"{self.name} (process {self.pid}) died: {reason}"))
