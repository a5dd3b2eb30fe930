"""Several replicas as one Engine: prefix-aware routing, health checks, and retry of requests whose replica died.

    submit ──▶ choose(prefix, load) ──▶ replica 0 ─┐ deltas: recorded in the flight, passed on
                                    ──▶ replica 1 ─┤ completion: joined with what earlier replicas made
                                    ──▶ …          ┘ PeerDiedError: the flight goes on elsewhere, from its last token
    caretaker thread: asks every replica for its stats, ends those that do not answer, starts dead ones again

A continued request has the tokens so far as prompt, the same seed and what is left of its length. Engines that draw
by (seed, position), as the native one does, then give the very tokens that the dead replica would have given;
penalties that count generated tokens only (presence, frequency) start anew at the break. A replica refuses a malformed
request through its future, not in submit().
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from rill.config import Config, PartConfig
from rill.errors import EngineError, PeerDiedError, RillError, StuckError, WeightSyncError
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
from rill.inference.flight import Flight
from rill.inference.checkpoint import Checkpoint
from rill.inference.server.prefix_index import PrefixIndex
from rill.inference.server.replica import ReplicaEngine
from rill.types import Floats, PolicyVersion, TokenIds

log = logging.getLogger(__name__)


class RouterConfig(Config):
    num_replicas: int = Field(default=1, ge=1)
    """Processes, each with an engine of its own."""
    devices: list[str] = []
    """CUDA_VISIBLE_DEVICES of each replica, e.g. ["0", "1"]. Empty: replicas see what the parent sees."""
    max_retries: int = Field(default=3, ge=0)
    """How often one request may lose its replica before it fails. 0: no retry."""
    health_interval_s: float = Field(default=5.0, gt=0)
    """Between two health checks, in seconds."""
    health_timeout_s: float = Field(default=30.0, gt=0)
    """A replica that does not answer for this long is ended and started again, in seconds."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long loading may take; also how long a request waits for any replica, in seconds."""
    max_failed_starts: int = Field(default=3, ge=1)
    """A replica that fails to start this often in a row is given up."""
    load_gap: int = Field(default=32, ge=0)
    """Prefixes are ignored when the busiest replica has this many more requests than the idlest."""


class SlotState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    GIVEN_UP = "given up"


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one replica, whatever process fills it."""

    index: int
    state: SlotState = SlotState.STARTING
    engine: ReplicaEngine | None = None
    num_in_flight: int = 0
    num_failed_starts: int = 0
    num_starts: int = 0


@dataclass(slots=True)
class _Control:
    """What a replica that joins later must be told to be like the others."""

    pause: PauseMode | None = None
    release: MemoryLevel | None = None
    updates: list[tuple[Checkpoint, PolicyVersion, bool]] = field(default_factory=list)
    """The last whole update and the partial ones after it."""


class Router:
    """An Engine made of replicas. Returns from construction when all of them are loaded."""

    def __init__(self, engine: PartConfig, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self._engine_config = engine
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._slots = [Slot(index) for index in range(self.config.num_replicas)]
        self._flights: dict[str, Flight] = {}
        self._waiting: list[Flight] = []
        self._prefixes = PrefixIndex()
        self._control = _Control()
        self._num_retried = 0
        self._version = PolicyVersion(0)
        self._is_closed = False
        self._spill = tempfile.TemporaryDirectory(
            prefix="rill-weights-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
        self._pool = ThreadPoolExecutor(self.config.num_replicas + 2, thread_name_prefix="router")
        self._start_all()
        self._caretaker = threading.Thread(target=self._take_care, name="router-caretaker", daemon=True)
        self._caretaker.start()

    @property
    def features(self) -> frozenset[Feature]:
        return self._features

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        flights = [Flight(request, on_delta) for request in requests]
        with self._lock:
            if self._is_closed:
                raise EngineError("the router is closed")
            for flight in flights:
                self._flights[flight.request.id] = flight
        self._dispatch(flights)
        return [flight.future for flight in flights]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        futures = self.submit(requests)
        try:
            return [f.result(max(0.0, deadline - time.monotonic())) for f in futures]
        except FutureTimeoutError:
            self.abort([r.id for r in requests])
            raise StuckError(f"router: generate did not end within {timeout_s} s") from None

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        """Split over the replicas. Scoring has no state, so a part whose replica dies is done again."""
        slots = self._ready()
        parts = [list(range(i, len(sequences), len(slots))) for i in range(len(slots))]
        scores: dict[int, Floats] = {}

        def run(slot: Slot, part: list[int]) -> None:
            assert slot.engine is not None
            values = slot.engine.score([sequences[i] for i in part], temperature, timeout_s)
            scores.update(zip(part, values, strict=True))

        failed = self._each(run, [(s, p) for s, p in zip(slots, parts, strict=True) if p], PeerDiedError)
        for _, part in failed:
            run(self._ready()[0], part)
        return [scores[i] for i in range(len(sequences))]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._lock:
            wanted = set(self._flights if request_ids is None else request_ids)
            parked = [f for f in self._waiting if f.request.id in wanted]
            self._waiting = [f for f in self._waiting if f not in parked]
            slots = [s for s in self._slots if s.state is SlotState.READY]
            for request_id in wanted & self._flights.keys():
                self._flights[request_id].is_aborted = True
        for flight in parked:
            self._end(flight, flight.aborted())
        ids = None if request_ids is None else sorted(wanted)
        self._each(lambda slot: _engine(slot).abort(ids), [(s,) for s in slots], PeerDiedError)

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        self._control.pause = mode
        self._on_all(lambda engine: engine.pause(mode, timeout_s))

    def resume(self) -> None:
        self._control.pause = None
        self._on_all(lambda engine: engine.resume())

    def release(self, level: MemoryLevel) -> None:
        self._on_all(lambda engine: engine.release(level))
        self._control.release = level

    def restore(self) -> None:
        self._control.release = None
        self._on_all(lambda engine: engine.restore())

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """All replicas read the same files at once. The files stay until the next whole update, for late joiners."""
        if version <= self._version:
            raise WeightSyncError(f"version {version} is not newer than {self._version}")
        checkpoint = tensors
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.write(tensors, Path(self._spill.name) / f"{version}.safetensors")
        update = (checkpoint, version, partial)
        self._on_all(lambda engine: engine.update_weights(checkpoint, version, partial=partial))
        with self._lock:
            dropped = [] if partial else self._control.updates
            self._control.updates = [*(self._control.updates if partial else []), update]
            self._version = version
            self._prefixes.forget()
        for old, _, _ in dropped:
            for shard in old.shards:
                if shard.parent == Path(self._spill.name):
                    shard.unlink(missing_ok=True)

    def flush(self) -> None:
        with self._lock:
            self._prefixes.forget()
        self._on_all(lambda engine: engine.flush())

    def stats(self) -> EngineStats:
        """Sums over the replicas that answer; `extra` says how many are ready and how often a request moved."""
        found: list[EngineStats] = []

        def ask(slot: Slot) -> None:
            found.append(_engine(slot).ping(self.config.health_timeout_s))

        slots = self._ready_now()
        self._each(ask, [(s,) for s in slots], PeerDiedError, StuckError)
        totals = {
            name: sum(getattr(s, name) for s in found)
            for name in EngineStats.__dataclass_fields__
            if name.startswith("num_")
        }
        with self._lock:
            extra = {"replicas": float(len(slots)), "retried": float(self._num_retried)}
            extra["waiting_for_replica"] = float(len(self._waiting))
        return EngineStats(**totals, version=self._version, extra=extra)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            flights = list(self._flights.values())
            engines = [s.engine for s in self._slots if s.engine is not None]
        for engine in engines:
            engine.close()
        for flight in flights:
            self._end(flight, flight.aborted())
        self._caretaker.join(10.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._spill.cleanup()

    # --- routing -----------------------------------------------------------------------------------------

    def _dispatch(self, flights: Sequence[Flight]) -> None:
        """Choose for each, then send together what goes together: a group reaches its replica in one instant."""
        batches: dict[tuple[int, bool], list[Flight]] = {}
        with self._lock:
            for flight in flights:
                slot = self._choose(flight)
                if slot is None:
                    flight.parked_at = time.monotonic()
                    self._waiting.append(flight)
                    continue
                flight.slot_index = slot.index
                slot.num_in_flight += 1
                batches.setdefault((slot.index, flight.on_delta is not None), []).append(flight)
        for (index, is_streamed), batch in batches.items():
            self._send(self._slots[index], batch, is_streamed)

    def _choose(self, flight: Flight) -> Slot | None:
        """The replica with most of the prompt in its cache, unless it is much busier than the idlest."""
        ready = [s for s in self._slots if s.state is SlotState.READY]
        if not ready:
            return None
        request = flight.next_request()
        idlest = min(ready, key=lambda s: s.num_in_flight)
        chosen = idlest
        if len(ready) > 1:
            matched = self._prefixes.match(request.token_ids, request.cache_salt)
            best = max(ready, key=lambda s: (matched.get(s.index, 0), -s.num_in_flight))
            is_worth = matched.get(best.index, 0) * 2 >= len(request.token_ids)
            if is_worth and best.num_in_flight - idlest.num_in_flight <= self.config.load_gap:
                chosen = best
            self._prefixes.insert(request.token_ids, request.cache_salt, chosen.index)
        return chosen

    def _send(self, slot: Slot, flights: list[Flight], is_streamed: bool) -> None:
        engine = _engine(slot)
        try:
            futures = engine.submit_recorded(
                [f.next_request() for f in flights], self._on_delta, is_streamed=is_streamed
            )
        except PeerDiedError as error:
            for flight in flights:
                self._on_loss(flight, error)
            return
        for flight, future in zip(flights, futures, strict=True):
            future.add_done_callback(lambda done, flight=flight: self._on_done(flight, done))  # type: ignore[misc]

    def _on_delta(self, delta: Delta) -> None:
        with self._lock:
            flight = self._flights.get(delta.request_id)
        if flight is not None:
            flight.record(delta)

    def _on_done(self, flight: Flight, done: Future[Completion]) -> None:
        error = done.exception()
        if isinstance(error, PeerDiedError):
            self._on_loss(flight, error)
        elif error is not None:
            self._end(flight, error)
        else:
            self._end(flight, flight.joined(done.result()))

    def _on_loss(self, flight: Flight, error: Exception) -> None:
        """The replica died under this request: go on elsewhere, unless it was over, or often unlucky."""
        flight.num_losses += 1
        ended = flight.already_ended()
        if ended is not None or flight.is_aborted or self._is_closed:
            self._end(flight, ended or flight.aborted())
        elif flight.num_losses > self.config.max_retries:
            self._end(
                flight, EngineError(f"{flight.num_losses} replicas died under this request; last: {error}")
            )
        else:
            with self._lock:
                self._leave_slot(flight)
                self._mark_dead()
                self._num_retried += 1
            flight.restart()
            self._dispatch([flight])

    def _end(self, flight: Flight, outcome: Completion | BaseException) -> None:
        with self._lock:
            if self._flights.pop(flight.request.id, None) is None:
                return
            self._leave_slot(flight)
        flight.finish(outcome)

    def _leave_slot(self, flight: Flight) -> None:
        if flight.slot_index is not None:
            self._slots[flight.slot_index].num_in_flight -= 1
            flight.slot_index = None

    # --- care --------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        futures = [self._pool.submit(self._start, slot) for slot in self._slots]
        errors = [e for f in futures if (e := f.exception(self.config.start_timeout_s + 30.0)) is not None]
        if errors:
            for slot in self._slots:
                if slot.engine is not None:
                    slot.engine.kill()
            self._spill.cleanup()
            raise errors[0]
        engines = [_engine(slot) for slot in self._slots]
        self._features = frozenset.intersection(*(e.features for e in engines))
        self._max_context = min(e.max_context for e in engines)
        self._version = engines[0].version
        for slot in self._slots:
            slot.state = SlotState.READY

    def _start(self, slot: Slot) -> None:
        environment = {}
        if self.config.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.config.devices[slot.index % len(self.config.devices)]
        slot.num_starts += 1
        slot.engine = ReplicaEngine(
            self._engine_config,
            name=f"replica-{slot.index}-{slot.num_starts}",
            environment=environment,
            start_timeout_s=self.config.start_timeout_s,
        )

    def _take_care(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or any(s.state is SlotState.DEAD for s in self._slots),
                    self.config.health_interval_s,
                )
                if self._is_closed:
                    return
                dead = [s for s in self._slots if s.state is SlotState.DEAD]
                for slot in dead:
                    slot.state = SlotState.STARTING
            for slot in dead:
                threading.Thread(target=self._restart, args=(slot,), daemon=True).start()
            self._check_health()
            self._expire_waiting()

    def _check_health(self) -> None:
        def check(slot: Slot) -> None:
            try:
                _engine(slot).ping(self.config.health_timeout_s)
            except StuckError as error:
                log.warning("%s: ended, because %s", _engine(slot).name, error)
                _engine(slot).kill()
                raise PeerDiedError(str(error)) from error

        for (slot,) in self._each(check, [(s,) for s in self._ready_now()], PeerDiedError):
            with self._lock:
                self._set_dead(slot)

    def _restart(self, slot: Slot) -> None:
        try:
            self._start(slot)
            self._catch_up(slot)
        except RillError as error:
            slot.num_failed_starts += 1
            log.error("replica %d did not start (%d): %s", slot.index, slot.num_failed_starts, error)
            given_up = slot.num_failed_starts >= self.config.max_failed_starts
            with self._changed:
                slot.state = SlotState.GIVEN_UP if given_up else SlotState.DEAD
                self._changed.notify_all()
            return
        with self._lock:
            slot.state = SlotState.READY
            slot.num_failed_starts = 0
            waiting, self._waiting = self._waiting, []
        log.info("replica %d is back", slot.index)
        self._dispatch(waiting)

    def _catch_up(self, slot: Slot) -> None:
        """Make a fresh replica like the others: weights first, then pause and released memory."""
        engine = _engine(slot)
        for checkpoint, version, partial in self._control.updates:
            engine.update_weights(checkpoint, version, partial=partial)
        if engine.version != self._version:
            raise WeightSyncError(f"the replica has version {engine.version}, the others {self._version}")
        if self._control.pause is not None:
            engine.pause(self._control.pause)
        if self._control.release is not None:
            engine.release(self._control.release)

    def _mark_dead(self) -> None:
        for slot in self._slots:
            if slot.state is SlotState.READY and slot.engine is not None and slot.engine.is_dead:
                self._set_dead(slot)

    def _set_dead(self, slot: Slot) -> None:
        if slot.state is SlotState.READY:
            slot.state = SlotState.DEAD
            self._prefixes.forget(slot.index)
            self._changed.notify_all()

    def _expire_waiting(self) -> None:
        """Requests that no replica has taken for too long, or that none ever will, fail."""
        with self._lock:
            hopeless = all(s.state is SlotState.GIVEN_UP for s in self._slots)
            limit = time.monotonic() - self.config.start_timeout_s
            late = [f for f in self._waiting if hopeless or f.parked_at < limit]
            self._waiting = [f for f in self._waiting if f not in late]
        for flight in late:
            self._end(flight, EngineError("no replica is alive to take this request"))

    # --- all replicas ------------------------------------------------------------------------------------

    def _ready_now(self) -> list[Slot]:
        with self._lock:
            return [s for s in self._slots if s.state is SlotState.READY]

    def _ready(self) -> list[Slot]:
        ready = self._ready_now()
        if not ready:
            raise EngineError("no replica is alive")
        return ready

    def _on_all(self, act: Callable[[ReplicaEngine], None]) -> None:
        """On every ready replica at once. One that dies meanwhile catches up when it is back."""
        for (slot,) in self._each(
            lambda slot: act(_engine(slot)), [(s,) for s in self._ready()], PeerDiedError
        ):
            with self._lock:
                self._set_dead(slot)

    def _each(
        self, act: Callable[..., None], arguments: list[tuple[Any, ...]], *tolerated: type[Exception]
    ) -> list[tuple[Any, ...]]:
        """Run in parallel; return the arguments whose run ended in a tolerated error, raise any other."""
        futures = [self._pool.submit(act, *args) for args in arguments]
        failed, errors = [], []
        for args, future in zip(arguments, futures, strict=True):
            error = future.exception()
            if isinstance(error, tolerated):
                failed.append(args)
            elif error is not None:
                errors.append(error)
        if errors:
            raise errors[0]
        return failed


def _engine(slot: Slot) -> ReplicaEngine:
    assert slot.engine is not None
    return slot.engine
