"""The replicas of a router: started, watched, started again, and all told the same.

    caretaker thread: asks every replica for its stats, ends those that do not answer, starts dead ones again
    on_all:           the same call on every ready replica at once; one that dies meanwhile catches up when it is back

What made all the same (weights, adapters, pause, released memory) is remembered and told to a replica that comes late,
before it takes a request.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rill.config import Config, PartConfig
from rill.errors import EngineError, ModelError, PeerDiedError, RillError, WeightSyncError
from rill.inference.base import ADAPTER_FILES, Delta, Feature, MemoryLevel, NamedTensors, PauseMode
from rill.inference.checkpoint import Checkpoint
from rill.inference.commands import MOVE_TIMEOUT_S
from rill.inference.replica import End, ReplicaProcess
from rill.runtime.cluster import Cluster
from rill.runtime.device.placement import Placement
from rill.runtime.process.scratch import ScratchFolder
from rill.types import PolicyVersion

log = logging.getLogger(__name__)

T = TypeVar("T")


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


class ReplicaSet:
    """Base of the router. Returns from construction when all replicas are loaded. `lock` guards the slots' states, and
    whatever else the router keeps."""

    def __init__(self, engine: PartConfig, config: RouterConfig) -> None:
        self.config = config
        self._engine_config = engine
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.slots = [Slot(index) for index in range(config.num_replicas)]
        self._telling = threading.Lock()
        """Held while all are told something, and while a late joiner is told everything: it misses nothing."""
        self._told: dict[tuple[str, str], _Told] = {}
        """By method, and the adapter or version that it is about; in the order in which a late joiner is told."""
        self.is_closed = False
        self._spill = ScratchFolder("replicas")
        self._cluster = Cluster()
        self._pool = ThreadPoolExecutor(config.num_replicas + 2, thread_name_prefix="router")
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

    def _on_news(self, deltas: list[Delta], ends: list[End]) -> None:
        """A replica reports."""

    def _on_loss(self, replica: ReplicaProcess, reason: PeerDiedError) -> None:
        """A replica is gone, and its slot knows."""

    def _on_round(self) -> None:
        """After every health check, and when a replica is back."""

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

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            replicas = [s.replica for s in self.slots if s.replica is not None]
        for replica in replicas:
            replica.close()
        self._caretaker.join(10.0)
        self._cluster.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._spill.close()

    # --- control -----------------------------------------------------------------------------------------

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
            checkpoint = tensors
            if not isinstance(checkpoint, Checkpoint):
                checkpoint = Checkpoint.write(tensors, folder / "model.safetensors")
            told = _Told((checkpoint, version), {"partial": partial, "timeout_s": MOVE_TIMEOUT_S}, folder)
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
            self._told["update_weights", str(version)] = told
            self.version = version

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
                on_death=self._on_death,
            )
            with self._telling:
                self._catch_up(replica)
                with self._changed:
                    if self.is_closed:
                        raise EngineError("the router is closed")
                    slot.replica, slot.is_starting, slot.num_failed_starts = replica, False, 0
                    self._changed.notify_all()
        except (RillError, OSError) as error:
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

    def _on_death(self, replica: ReplicaProcess, reason: PeerDiedError) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_loss(replica, reason)

    # --- all replicas ------------------------------------------------------------------------------------

    def on_all(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call this of every ready replica at once. One that dies meanwhile catches up when it is back."""
        self.each(lambda replica: replica.call(method, *args, **kwargs), self.ready_or_fail())

    def each(self, act: Callable[[ReplicaProcess], T], replicas: Sequence[ReplicaProcess]) -> list[T | None]:
        """At once; what each gave. One that died has given nothing; any other error is raised when all have ended."""
        futures = [self._pool.submit(act, replica) for replica in replicas]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, PeerDiedError):
                raise error
        return [
            future.result() if error is None else None for future, error in zip(futures, errors, strict=True)
        ]
