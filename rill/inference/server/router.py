"""Several replicas as one Engine: prefix-aware routing, health checks, and retry of requests whose replica died.

    submit ──▶ choose(prefix, load) ──▶ replica 0 ─┐ deltas: recorded in the flight, passed on
                                    ──▶ replica 1 ─┤ completion: joined with what earlier replicas made
                                    ──▶ …          ┘ PeerDiedError: the flight goes on elsewhere, from its last token
    on_all:           the same call on every ready replica at once; one that dies meanwhile catches up when it is back
    caretaker thread: asks every replica for its stats, ends those that do not answer, starts dead ones again

A continued request has the tokens so far as prompt, the same seed and what is left of its length. Engines that draw
by (seed, position), as the native one does, then give the very tokens that the dead replica would have given. Malformed
requests are refused here; what only the replica's engine can know to be wrong comes through the request's future.

What made all the same (weights, adapters, pause, released memory) is remembered and told to a replica that comes late,
before it takes a request.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rill.config import Config, PartConfig
from rill.errors import EngineError, ModelError, PeerDiedError, RillError, WeightSyncError
from rill.inference.base import (
    ADAPTER_FILES,
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.commands import MOVE_TIMEOUT_S
from rill.inference.continued import Flight
from rill.inference.parameters import Checkpoint
from rill.inference.replica import End, ReplicaProcess
from rill.inference.requests import Generates, check_ids, check_request
from rill.inference.server.prefix_index import PrefixIndex
from rill.inference.tally import total
from rill.runtime.cluster import Cluster
from rill.runtime.device.placement import Placement
from rill.runtime.process.scratch import ScratchFolder
from rill.types import Floats, PolicyVersion, TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")

RECORD_WAIT_S = 0.1
"""How long tokens that nobody streams may wait: at most this much work is lost with the process."""


class RouterConfig(Config):
    num_replicas: int = Field(default=1, ge=1)
    """Processes, each with an engine of its own."""
    devices: list[Annotated[str, Field(pattern=r"^\d+(,\d+)*$")]] = []
    """The devices of each replica, e.g. ["0", "1"] or ["0,1", "2,3"], as the runtime numbers them. Empty: one each, in
    turn over all."""
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


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one replica, whatever process fills it."""

    index: int
    replica: ReplicaProcess | None = None
    """The last one that was ready."""
    is_starting: bool = False
    num_starts: int = 0
    num_failed_starts: int = 0
    """Since one was ready."""
    failure: Exception | None = None
    """Of the last start that failed."""

    @property
    def is_ready(self) -> bool:
        return self.replica is not None and not self.replica.is_dead


@dataclass(frozen=True, slots=True)
class _Told:
    """A call that made the replicas what they are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    folder: Path | None
    """What it reads. A copy: its source may be gone or changed by the time that a late joiner reads it."""


class Router(Generates):
    """An Engine made of replicas. Returns from construction when all of them are loaded. `lock` guards the states of
    slots, and what is under way."""

    def __init__(self, engine: PartConfig, config: RouterConfig | None = None) -> None:
        self.config = config = config or RouterConfig()
        self._engine_config = engine
        self._flights: dict[str, Flight] = {}
        self._waiting: list[Flight] = []
        self._prefixes = PrefixIndex()
        self._num_retried = 0
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.slots = [Slot(index) for index in range(config.num_replicas)]
        self._telling = threading.Lock()
        """Held while all are told something, and while a late joiner is told everything: it misses nothing."""
        self._told: dict[tuple[str, str], _Told] = {}
        """By method, and the adapter or the weights' folder that it is about; as late joiners are told."""
        self.is_closed = False
        self._spill = ScratchFolder("replicas")
        self._cluster = Cluster()
        self._caretaker = threading.Thread(target=self._take_care, name="router-caretaker", daemon=True)
        self._caretaker.start()
        self._wait_for_all()
        replicas = [slot.replica for slot in self.slots if slot.replica is not None]
        self.features: frozenset[Feature] = frozenset.intersection(*(r.features for r in replicas))
        self.max_context = min(replica.max_context for replica in replicas)
        self.vocab_size, self.version = replicas[0].vocab_size, replicas[0].version

    def _wait_for_all(self) -> None:
        """One that does not load at first would not load later."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(slot.is_ready or slot.failure for slot in self.slots),
                self.config.start_timeout_s + 30.0,
            )
            missing = [slot.failure for slot in self.slots if not slot.is_ready]
        if missing:
            self.close()
            raise missing[0] or EngineError(f"no engine within {self.config.start_timeout_s} s")

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(name for method, name in list(self._told) if method == "load_adapter")

    def ready(self) -> list[ReplicaProcess]:
        with self.lock:
            return [slot.replica for slot in self.slots if slot.replica is not None and slot.is_ready]

    def ready_or_fail(self) -> list[ReplicaProcess]:
        ready = self.ready()
        if not ready:
            raise EngineError("no replica is alive")
        return ready

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        adapters = self.adapters
        for request in requests:
            check_request(request, self, adapters)
        flights = [Flight(request, on_delta) for request in requests]
        with self.lock:
            if self.is_closed:
                raise EngineError("the router is closed")
            check_ids([request.id for request in requests], self._flights)
            self._flights.update((flight.request.id, flight) for flight in flights)
        self._dispatch(flights)
        return [flight.future for flight in flights]

    def score(
        self,
        sequences: Sequence[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        options = {} if adapter is None else {"adapter": adapter}
        return self._spread("score", sequences, temperature, timeout_s, timeout_s=timeout_s, **options)

    def embed(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        return self._spread("embed", sequences, timeout_s, timeout_s=timeout_s)

    def _spread(self, method: str, sequences: Sequence[TokenIds], *args: Any, **kwargs: Any) -> list[Floats]:
        """Split over the replicas. Reading has no state, so a part whose replica dies is done again."""
        replicas = self.ready_or_fail()
        count = len(replicas)
        parts = {replica: list(sequences[i::count]) for i, replica in enumerate(replicas)}

        def read(replica: ReplicaProcess) -> Any:
            part = parts[replica]
            try:
                return replica.call(method, part, *args, **kwargs) if part else []
            except PeerDiedError:
                return self.ready_or_fail()[0].call(method, part, *args, **kwargs)

        found: list[Any] = [None] * len(sequences)
        for i, values in enumerate(self.each(read, replicas)):
            if values is None:
                raise EngineError(f"two replicas died under {method}()")
            found[i::count] = values
        return found

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self.lock:
            wanted = set(self._flights if request_ids is None else request_ids)
            parked = [f for f in self._waiting if f.request.id in wanted]
            self._waiting = [f for f in self._waiting if f.request.id not in wanted]
            for request_id in wanted & self._flights.keys():
                self._flights[request_id].is_aborted = True
        for flight in parked:
            self._end(flight, flight.aborted())
        ids = None if request_ids is None else sorted(wanted)
        for replica in self.ready():
            with suppress(RillError):  # it died: its requests end as aborted
                replica.abort(ids)

    # --- control -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        with self.lock:
            self._prefixes.forget()
        self.on_all("flush")

    def stats(self) -> EngineStats:
        """Sums over the replicas that answer; `extra` says how many are ready and how often a request moved."""

        def ask(replica: ReplicaProcess) -> Any:
            with suppress(RillError):
                return replica.call("stats", timeout_s=self.config.health_timeout_s)

        replicas = self.ready()
        found = [stats for stats in self.each(ask, replicas) if stats is not None]
        with self.lock:
            extra = {"replicas": float(len(replicas)), "retried": float(self._num_retried)}
            extra["waiting_for_replica"] = float(len(self._waiting))
        return total(found, version=self.version, extra=extra)

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            replicas = [s.replica for s in self.slots if s.replica is not None]
        for replica in replicas:
            replica.close()
        self._caretaker.join(10.0)
        self._cluster.close()
        self._spill.close()
        with self.lock:
            flights = list(self._flights.values())
        for flight in flights:
            self._end(flight, flight.aborted())

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        told = _Told((mode, timeout_s), {"timeout_s": timeout_s + 5.0}, None)
        with self._telling:
            self._told["pause", ""] = told  # also where a replica is late: it is paused all the same
            self.on_all("pause", *told.args, **told.kwargs)

    def resume(self) -> None:
        with self._telling:
            self._forget("pause")
            self.on_all("resume")

    def release(self, level: MemoryLevel) -> None:
        with self._telling:
            self._tell("release", level, timeout_s=MOVE_TIMEOUT_S)

    def restore(self) -> None:
        with self._telling:
            self._forget("release")
            self.on_all("restore", timeout_s=MOVE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """All replicas read the same files at once. The files stay until the next whole update, for late joiners."""
        if version <= self.version:
            raise WeightSyncError(f"version {version} is not newer than {self.version}")
        with self._new_folder() as folder, self._telling:
            if isinstance(tensors, Checkpoint):
                tensors = _kept(tensors, folder)
            else:
                tensors = Checkpoint.write(tensors, folder / "model.safetensors")
            told = _Told((tensors, version), {"partial": partial, "timeout_s": MOVE_TIMEOUT_S}, folder)
            try:
                self.on_all("update_weights", *told.args, **told.kwargs)
            except RillError as error:
                behind = [replica for replica in self.ready() if replica.version != version]
                if len(behind) == len(self.ready()):
                    raise
                # Some have it: it is the version in service, and the others come to it like any late joiner.
                log.warning("a replica did not take version %d and is started again: %s", version, error)
                for replica in behind:
                    replica.kill()
            if not partial:
                for key in [key for key in self._told if key[0] in ("update_weights", "rewind")]:
                    self._forget(*key)
            self._told["update_weights", folder.name] = told
            self.version = version
        with self.lock:
            self._prefixes.forget()

    def rewind(self) -> None:
        with self._telling:
            self._tell("rewind")
            self.version = PolicyVersion(0)

    def load_adapter(self, name: str, source: str | Path) -> None:
        with self._new_folder() as folder, self._telling:
            try:
                for file in ADAPTER_FILES:
                    shutil.copyfile(Path(source) / file, folder / file)
            except (OSError, ValueError) as error:
                raise ModelError(f"{source} holds no PEFT adapter that can be read: {error}") from error
            self._tell("load_adapter", name, str(folder), timeout_s=MOVE_TIMEOUT_S, about=name, folder=folder)

    def unload_adapter(self, name: str) -> None:
        with self._telling:
            self.on_all("unload_adapter", name)
            self._forget("load_adapter", name)

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """For what all replicas read; gone where the block fails."""
        folder = Path(tempfile.mkdtemp(dir=self._spill.path))
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder)
            raise

    def _tell(
        self, method: str, *args: Any, about: str = "", folder: Path | None = None, **kwargs: Any
    ) -> None:
        """Tell all, and whoever comes late. The same of before is forgotten."""
        self.on_all(method, *args, **kwargs)
        self._forget(method, about)
        self._told[method, about] = _Told(args, kwargs, folder)

    def _forget(self, method: str, about: str = "") -> None:
        told = self._told.pop((method, about), None)
        if told is not None and told.folder is not None:
            shutil.rmtree(told.folder)

    # --- routing -----------------------------------------------------------------------------------------

    def _dispatch(self, flights: Sequence[Flight]) -> None:
        """Choose for each, then send together what goes together: a group reaches its replica in one instant."""
        batches: dict[ReplicaProcess, list[Flight]] = {}
        with self.lock:
            for flight in flights:
                replica = self._choose(flight.next_request())
                if replica is None:
                    flight.parked_at = time.monotonic()
                    self._waiting.append(flight)
                    continue
                flight.replica = replica
                replica.num_in_flight += 1
                batches.setdefault(replica, []).append(flight)
        for replica, batch in batches.items():
            with suppress(PeerDiedError):  # then all that it had is sent elsewhere, or ends as aborted
                replica.submit([_recorded(flight) for flight in batch])
                if late := [flight.request.id for flight in batch if flight.is_aborted]:
                    # They were between two replicas when the others were told.
                    replica.abort(late)

    def _choose(self, request: Request) -> ReplicaProcess | None:
        """The replica with most of the prompt in its cache, unless it is much busier than the idlest."""
        ready = self.ready()
        if not ready:
            return None
        chosen = idlest = min(ready, key=lambda r: r.num_in_flight)
        if len(ready) > 1:
            salt = f"{request.adapter or ''}\0{request.cache_salt}"  # what an engine's cache tells apart
            matched = self._prefixes.match(request.token_ids, salt)
            best = max(ready, key=lambda r: (matched.get(r.name, 0), -r.num_in_flight))
            is_worth = matched.get(best.name, 0) * 2 >= len(request.token_ids)
            if is_worth and best.num_in_flight - idlest.num_in_flight <= self.config.load_gap:
                chosen = best
            self._prefixes.insert(request.token_ids, salt, chosen.name)
        return chosen

    def _on_news(self, deltas: list[Delta], ends: list[End]) -> None:
        for delta in deltas:
            if (flight := self._flights.get(delta.request_id)) is not None:
                flight.record(delta)
        for end in ends:
            request_id = end.request_id if isinstance(end, Completion) else end[0]
            if (flight := self._flights.get(request_id)) is not None:
                self._end(flight, flight.joined(end) if isinstance(end, Completion) else end[1])

    def _on_loss(self, replica: ReplicaProcess, reason: PeerDiedError) -> None:
        """Its requests go on elsewhere, unless they were over, or often unlucky."""
        with self._changed:
            self._changed.notify_all()
            self._prefixes.forget(replica.name)
            lost = [flight for flight in self._flights.values() if flight.replica is replica]
        moved = []
        for flight in lost:
            flight.num_losses += 1
            ended = flight.already_ended()
            if ended is not None or flight.is_aborted or self.is_closed:
                self._end(flight, ended or flight.aborted())
            elif flight.num_losses > self.config.max_retries:
                message = f"{flight.num_losses} replicas died under this request; last: {reason}"
                self._end(flight, EngineError(message))
            else:
                flight.restart()
                moved.append(flight)
        with self.lock:
            self._num_retried += len(moved)
        self._dispatch(moved)

    def _end(self, flight: Flight, outcome: Completion | BaseException) -> None:
        with self.lock:
            if self._flights.pop(flight.request.id, None) is None:
                return
            if flight.replica is not None:
                flight.replica.num_in_flight -= 1
        flight.finish(outcome)

    def _on_round(self) -> None:
        """After every health check, and when a replica is back: what waits goes to it; what has waited too long, or
        would wait forever, fails."""
        with self.lock:
            limit = time.monotonic() - self.config.start_timeout_s
            if all(map(self.is_given_up, self.slots)):
                limit = math.inf
            late = [f for f in self._waiting if f.parked_at < limit]
            waiting = [f for f in self._waiting if f.parked_at >= limit]
            waiting, self._waiting = (waiting, []) if self.ready() else ([], waiting)
        for flight in late:
            self._end(flight, EngineError("no replica is alive to take this request"))
        self._dispatch(waiting)

    # --- care --------------------------------------------------------------------------------------------

    def _take_care(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or self._empty(), self.config.health_interval_s)
                if self.is_closed:
                    return
                for slot in self._empty():
                    slot.is_starting = True
                    threading.Thread(target=self._fill, args=(slot,), daemon=True).start()
            self._check_health()
            self._on_round()

    def _empty(self) -> list[Slot]:
        return [
            slot for slot in self.slots if not (slot.is_ready or slot.is_starting or self.is_given_up(slot))
        ]

    def is_given_up(self, slot: Slot) -> bool:
        return slot.num_failed_starts >= self.config.max_failed_starts

    def _check_health(self) -> None:
        def check(replica: ReplicaProcess) -> None:
            try:
                replica.call("stats", timeout_s=self.config.health_timeout_s)
            except PeerDiedError:
                pass
            except RillError as error:  # whatever it is: the caretaker must not end of it
                log.warning("%s: ended, because %s", replica.name, error)
                replica.kill()

        self.each(check, self.ready())

    def _fill(self, slot: Slot) -> None:
        """Start a process in the slot, and make it like the others before it takes a request."""
        replica = None
        slot.num_starts += 1
        try:
            replica = ReplicaProcess(
                self._config_of(slot),
                cluster=self._cluster,
                name=f"replica-{slot.index}-{slot.num_starts}",
                placement=self._placement(slot.index),
                start_timeout_s=self.config.start_timeout_s,
                on_news=self._on_news,
                on_death=self._on_loss,
            )
            with self._telling:
                self._catch_up(replica)
                with self._changed:
                    if self.is_closed:
                        raise EngineError("the router is closed")
                    slot.replica, slot.is_starting, slot.num_failed_starts = replica, False, 0
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 boundary: whatever it is, the place must not stay empty for ever
            if replica is not None:
                replica.kill()  # loaded, but not like the others: it must not keep a device's memory
            if self.is_closed:
                return
            with self._changed:
                slot.failure, slot.is_starting = error, False
                slot.num_failed_starts += 1
                self._changed.notify_all()
            log.error("replica %d did not start (%d): %s", slot.index, slot.num_failed_starts, error)
            return
        log.info("replica %d is ready", slot.index)
        self._on_round()

    def _catch_up(self, replica: ReplicaProcess) -> None:
        for (method, _), told in self._told.items():
            replica.call(method, *told.args, **told.kwargs)

    def _placement(self, index: int) -> Placement:
        """In turn over the devices that were named, or over all."""
        if not self.config.devices:
            return self._cluster.devices[index % len(self._cluster.devices)].id
        named = self.config.devices[index % len(self.config.devices)]
        return [[int(number) for number in named.split(",")]]

    def _config_of(self, slot: Slot) -> PartConfig:
        """Each with a seed of its own, where engines have one: two replicas that are asked the same must not draw the
        same, nor one the same again after a restart."""
        config = self._engine_config
        if "seed" not in type(config).model_fields:
            return config
        offset = slot.index + len(self.slots) * (slot.num_starts - 1)
        return config.model_copy(update={"seed": config.model_dump()["seed"] + offset})

    def on_all(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call this of every ready replica at once. One that dies meanwhile catches up when it is back."""
        self.each(lambda replica: replica.call(method, *args, **kwargs), self.ready_or_fail())

    def each(self, act: Callable[[ReplicaProcess], T], replicas: Sequence[ReplicaProcess]) -> list[T | None]:
        """At once; what each gave. One that died has given nothing; any other error is raised when all have ended."""
        # Threads of their own: a health check does not wait for texts that are scored.
        with ThreadPoolExecutor(max(1, len(replicas)), thread_name_prefix="router") as threads:
            futures = [threads.submit(act, replica) for replica in replicas]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, PeerDiedError):
                raise error
        return [
            future.result() if error is None else None for future, error in zip(futures, errors, strict=True)
        ]


def _kept(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """A copy; the caller's own files where there is no room for one."""
    copies = tuple(folder / f"{index:05d}.safetensors" for index in range(len(checkpoint.shards)))
    try:
        for shard, copy in zip(checkpoint.shards, copies, strict=True):
            shutil.copyfile(shard, copy)
    except OSError as error:
        log.warning("%s: a replica that joins late will look for the weights there", error)
        for copy in copies:
            copy.unlink(missing_ok=True)
        return checkpoint
    return replace(checkpoint, shards=copies)


def _recorded(flight: Flight) -> Request:
    """As the replica gets it. What nobody streams is told late and in bulk: enough to continue from."""
    request = flight.next_request()
    if flight.on_delta is not None or request.delta_interval_s:
        return request
    return replace(request, delta_interval_s=RECORD_WAIT_S)
