"""The replicas of a router: started, watched, started again, and all told the same.

    caretaker thread: asks every replica for its stats, ends those that do not answer, starts dead ones again
    on_all:           the same call on every ready replica at once; one that dies meanwhile catches up when it is back

What is the same for all (weights, adapters, pause, released memory) is remembered, so that a replica that comes late
can be brought to where the others are before it takes a request.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rill.config import Config, PartConfig
from rill.errors import EngineError, ModelError, PeerDiedError, RillError, StuckError, WeightSyncError
from rill.inference.base import ADAPTER_FILES, Feature, MemoryLevel, NamedTensors, PauseMode
from rill.inference.checkpoint import Checkpoint
from rill.inference.replica import ReplicaEngine
from rill.runtime.cluster import Cluster
from rill.runtime.device.placement import Placement
from rill.runtime.process.scratch import ScratchFolder
from rill.types import PolicyVersion

log = logging.getLogger(__name__)


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

    @property
    def running(self) -> ReplicaEngine:
        """The engine of a slot that is ready."""
        assert self.engine is not None
        return self.engine


@dataclass(slots=True)
class _Control:
    """What a replica that joins later must be told to be like the others."""

    pause: PauseMode | None = None
    release: MemoryLevel | None = None
    updates: list[tuple[Checkpoint, PolicyVersion, bool]] = field(default_factory=list)
    """The last whole update and the partial ones after it."""
    adapters: dict[str, Path] = field(default_factory=dict)
    """Adapters by name, each a copy: its source may be gone or changed by then."""


class ReplicaSet:
    """Base of the router. Returns from construction when all replicas are loaded. `lock` guards the slots' states and
    counts, and whatever else the router keeps."""

    def __init__(self, engine: PartConfig, config: RouterConfig) -> None:
        self.config = config
        self._engine_config = engine
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.slots = [Slot(index) for index in range(config.num_replicas)]
        self._control = _Control()
        self._telling = threading.Lock()
        """Held while all are told something, and while a late joiner is told everything: it misses nothing."""
        self.version = PolicyVersion(0)
        self.features: frozenset[Feature] = frozenset()
        self.max_context = 0
        self.vocab_size: int | None = None
        self.is_closed = False
        self._spill = ScratchFolder("replicas")
        self._cluster = Cluster()
        self._pool = ThreadPoolExecutor(config.num_replicas + 2, thread_name_prefix="router")
        self._start_all()
        self._caretaker = threading.Thread(target=self._take_care, name="router-caretaker", daemon=True)
        self._caretaker.start()

    def _on_ready(self) -> None:
        """A replica is back."""

    def _on_death(self, index: int) -> None:
        """A replica is gone."""

    def _on_round(self) -> None:
        """After every health check."""

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._control.adapters)

    @property
    def is_hopeless(self) -> bool:
        """No replica is alive, and none will be started again."""
        with self.lock:
            return all(s.state is SlotState.GIVEN_UP for s in self.slots)

    def ready(self) -> list[Slot]:
        with self.lock:
            return [s for s in self.slots if s.state is SlotState.READY]

    def ready_or_fail(self) -> list[Slot]:
        ready = self.ready()
        if not ready:
            raise EngineError("no replica is alive")
        return ready

    def find_dead(self) -> None:
        """Look for replicas whose process has ended; called when a request lost its own."""
        with self.lock:
            for slot in self.slots:
                if slot.state is SlotState.READY and slot.running.is_dead:
                    self._set_dead(slot)

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            engines = [s.engine for s in self.slots if s.engine is not None]
        for engine in engines:
            engine.close()
        self._caretaker.join(10.0)
        self._cluster.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._spill.close()

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        with self._telling:
            self._control.pause = mode
            self.on_all(lambda engine: engine.pause(mode, timeout_s))

    def resume(self) -> None:
        with self._telling:
            self._control.pause = None
            self.on_all(lambda engine: engine.resume())

    def release(self, level: MemoryLevel) -> None:
        with self._telling:
            self.on_all(lambda engine: engine.release(level))
            self._control.release = level

    def restore(self) -> None:
        with self._telling:
            self._control.release = None
            self.on_all(lambda engine: engine.restore())

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """All replicas read the same files at once. The files stay until the next whole update, for late joiners."""
        if version <= self.version:
            raise WeightSyncError(f"version {version} is not newer than {self.version}")
        checkpoint = tensors
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.write(tensors, self._spill.path / f"{version}.safetensors")
        with self._telling:
            taken: list[ReplicaEngine] = []

            def take(engine: ReplicaEngine) -> None:
                engine.update_weights(checkpoint, version, partial=partial)
                taken.append(engine)

            try:
                self.on_all(take)
            except RillError as error:
                if not taken:
                    self._drop(checkpoint)
                    raise
                # Some have it: it is the version in service, and the others come to it like any late joiner.
                log.warning("a replica did not take version %d and is started again: %s", version, error)
                self._end_all_but(taken)
            dropped = [] if partial else self._control.updates
            kept = self._control.updates if partial else []
            self._control.updates = [*kept, (checkpoint, version, partial)]
            self.version = version
        for old, _, _ in dropped:
            self._drop(old)

    def rewind(self) -> None:
        with self._telling:
            self.on_all(lambda engine: engine.rewind())
            self.version = PolicyVersion(0)

    def _end_all_but(self, engines: list[ReplicaEngine]) -> None:
        with self.lock:
            for slot in self.ready():
                if slot.running not in engines:
                    slot.running.kill()
                    self._set_dead(slot)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Remove the files, where they are our own."""
        for shard in checkpoint.shards:
            if shard.parent == self._spill.path:
                shard.unlink(missing_ok=True)

    def load_adapter(self, name: str, source: str | Path) -> None:
        """All replicas read one copy, which stays for late joiners."""
        copy = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._spill.path))
        try:
            for file in ADAPTER_FILES:
                shutil.copyfile(Path(source) / file, copy / file)
        except (OSError, ValueError) as error:
            shutil.rmtree(copy)
            raise ModelError(f"{source} holds no PEFT adapter that can be read: {error}") from error
        with self._telling:
            try:
                self.on_all(lambda engine: engine.load_adapter(name, copy))
            except BaseException:
                shutil.rmtree(copy)
                raise
            self._forget_adapter(name)
            self._control.adapters[name] = copy

    def unload_adapter(self, name: str) -> None:
        with self._telling:
            self.on_all(lambda engine: engine.unload_adapter(name))
            self._forget_adapter(name)

    def _forget_adapter(self, name: str) -> None:
        if (copy := self._control.adapters.pop(name, None)) is not None:
            shutil.rmtree(copy)

    # --- care --------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        futures = [self._pool.submit(self._start, slot) for slot in self.slots]
        errors = [e for f in futures if (e := f.exception(self.config.start_timeout_s + 30.0)) is not None]
        if errors:
            for slot in self.slots:
                if slot.engine is not None:
                    slot.engine.kill()
            self._cluster.close()
            self._spill.close()
            raise errors[0]
        engines = [slot.running for slot in self.slots]
        self.features = frozenset.intersection(*(e.features for e in engines))
        self.max_context = min(e.max_context for e in engines)
        self.vocab_size = engines[0].vocab_size
        self.version = engines[0].version
        for slot in self.slots:
            slot.state = SlotState.READY

    def _start(self, slot: Slot) -> None:
        slot.num_starts += 1
        slot.engine = ReplicaEngine(
            self._config_of(slot),
            cluster=self._cluster,
            name=f"replica-{slot.index}-{slot.num_starts}",
            placement=self._placement(slot.index),
            start_timeout_s=self.config.start_timeout_s,
        )

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

    def _take_care(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.is_closed or any(s.state is SlotState.DEAD for s in self.slots),
                    self.config.health_interval_s,
                )
                if self.is_closed:
                    return
                dead = [s for s in self.slots if s.state is SlotState.DEAD]
                for slot in dead:
                    slot.state = SlotState.STARTING
            for slot in dead:
                threading.Thread(target=self._restart, args=(slot,), daemon=True).start()
            self._check_health()
            self._on_round()

    def _check_health(self) -> None:
        def check(slot: Slot) -> None:
            try:
                slot.running.stats(self.config.health_timeout_s)
            except StuckError as error:
                log.warning("%s: ended, because %s", slot.running.name, error)
                slot.running.kill()
                raise PeerDiedError(str(error)) from error

        for (slot,) in self.each(check, [(s,) for s in self.ready()], PeerDiedError):
            with self.lock:
                self._set_dead(slot)

    def _restart(self, slot: Slot) -> None:
        before = slot.engine
        try:
            self._start(slot)
            with self._telling:
                self._catch_up(slot)
                with self.lock:
                    is_late = self.is_closed
                    if not is_late:
                        slot.state = SlotState.READY
                        slot.num_failed_starts = 0
            if is_late:
                slot.running.close()
                return
        except (RillError, OSError) as error:
            if slot.engine is not None and slot.engine is not before:
                slot.engine.kill()  # loaded, but not like the others: it must not keep a device's memory
            if self.is_closed:
                return
            slot.num_failed_starts += 1
            log.error("replica %d did not start (%d): %s", slot.index, slot.num_failed_starts, error)
            given_up = slot.num_failed_starts >= self.config.max_failed_starts
            with self._changed:
                slot.state = SlotState.GIVEN_UP if given_up else SlotState.DEAD
                self._changed.notify_all()
            return
        log.info("replica %d is back", slot.index)
        self._on_ready()

    def _catch_up(self, slot: Slot) -> None:
        """Make a fresh replica like the others: weights and adapters first, then pause and released memory."""
        engine = slot.running
        for checkpoint, version, partial in self._control.updates:
            engine.update_weights(checkpoint, version, partial=partial)
        for name, folder in self._control.adapters.items():
            engine.load_adapter(name, folder)
        if engine.version != self.version:
            raise WeightSyncError(f"the replica has version {engine.version}, the others {self.version}")
        if self._control.pause is not None:
            engine.pause(self._control.pause)
        if self._control.release is not None:
            engine.release(self._control.release)

    def _set_dead(self, slot: Slot) -> None:
        if slot.state is SlotState.READY:
            slot.state = SlotState.DEAD
            self._on_death(slot.index)
            self._changed.notify_all()

    # --- all replicas ------------------------------------------------------------------------------------

    def on_all(self, act: Callable[[ReplicaEngine], None]) -> None:
        """On every ready replica at once. One that dies meanwhile catches up when it is back."""
        for (slot,) in self.each(
            lambda slot: act(slot.running), [(s,) for s in self.ready_or_fail()], PeerDiedError
        ):
            with self.lock:
                self._set_dead(slot)

    def each(
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
