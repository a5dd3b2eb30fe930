"""Brings every engine to the trainer's version, and knows which ones are there.

Called by the loop after every optimizer step:

    sync(named_weights, version)
        publish ──▶ manifest ──▶ every target pulls (beside one another, one deadline) ──▶ canary ──▶ in service
                                     └── failed or late: named, out of service, tried again at the next sync

An engine that is out of service holds an older version and must get no new requests; the run goes on with the
others. It comes back by itself once a pull of a newer version succeeds and its canary agrees.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pydantic import Field

from rill.config import Config
from rill.errors import WeightSyncError
from rill.types import Floats, PolicyVersion, TokenIds
from rill.weights.base import NamedTensors, Receiver, WeightManifest
from rill.weights.canary import Canary, CanaryReport
from rill.weights.resharding import ShardSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PullTarget(Protocol):
    """One engine, wherever it runs."""

    @property
    def name(self) -> str: ...

    def pull(self, manifest: WeightManifest) -> Future[PolicyVersion]:
        """Start pulling; the future gives the version that the engine then holds."""
        ...

    def score(self, sequences: Sequence[TokenIds]) -> Future[list[Floats]]:
        """Log-probabilities for the canary."""
        ...


class PublishingSide(Protocol):
    """The trainer's end, wherever it runs; rill.weights.base.Publisher is one."""

    def publish(self, named_tensors: NamedTensors, version: PolicyVersion) -> WeightManifest: ...

    def serve(self, manifest: WeightManifest, timeout_s: float = 600.0) -> None: ...


class WeightSyncConfig(Config):
    timeout_s: float = Field(default=300.0, gt=0)
    """An engine that has not taken the weights by then is out of service until it has."""
    min_in_service: int = Field(default=1, ge=0)
    """With fewer engines than this the sync is an error. 0: the run waits for engines to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """What is known of one engine."""

    version: PolicyVersion | None = None
    in_service: bool = False
    failure: str = ""
    """Why it is out of service."""
    num_failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    version: PolicyVersion
    in_service: tuple[str, ...]
    failed: Mapping[str, str]
    """Engines out of service, with the reason."""
    num_bytes: int
    publish_s: float
    pull_s: float
    canary: Mapping[str, CanaryReport] = field(default_factory=dict)


class WeightSync:
    """Tracks the engines of a run.

    `trainer_logprobs`, given with a canary, scores the canary's sequences with the weights just published.
    """

    def __init__(
        self,
        publisher: PublishingSide,
        targets: Sequence[PullTarget],
        config: WeightSyncConfig | None = None,
        *,
        canary: Canary | None = None,
    ) -> None:
        names = [target.name for target in targets]
        if len(set(names)) < len(names):
            raise WeightSyncError(f"two engines have one name: {sorted(names)}")
        self.config = config or WeightSyncConfig()
        self.publisher = publisher
        self.canary = canary
        self._targets = {target.name: target for target in targets}
        self._states = {name: TargetState() for name in names}
        self._busy: dict[str, Future[PolicyVersion]] = {}
        self._expected: Sequence[Floats] | None = None
        """The trainer's canary scores of the newest version."""
        self._lock = threading.Lock()

    def sync(
        self,
        named_tensors: NamedTensors,
        version: PolicyVersion,
        trainer_logprobs: Callable[[Sequence[TokenIds]], Sequence[Floats]] | None = None,
    ) -> SyncReport:
        """Publish and bring every engine to `version`. Engines that fail are in the report, not raised."""
        started = time.perf_counter()
        manifest = self.publisher.publish(named_tensors, version)
        published = time.perf_counter()
        return self.distribute(manifest, trainer_logprobs, publish_s=published - started)

    def distribute(
        self,
        manifest: WeightManifest,
        trainer_logprobs: Callable[[Sequence[TokenIds]], Sequence[Floats]] | None = None,
        *,
        publish_s: float = 0.0,
    ) -> SyncReport:
        """The second half of sync(), for a manifest that was published elsewhere."""
        started = time.perf_counter()
        futures = self._start_pulls(manifest)
        self.publisher.serve(manifest, self.config.timeout_s)
        wait(futures.values(), timeout=max(0.0, self.config.timeout_s - (time.perf_counter() - started)))
        for name, future in futures.items():
            self._settle(name, future, manifest)
        pull_s = time.perf_counter() - started
        reports = {}
        self._expected = None
        if trainer_logprobs is not None:
            reports = self._prove(manifest.version, trainer_logprobs)
        self._require_engines(manifest.version)
        return SyncReport(
            version=manifest.version,
            in_service=tuple(self.in_service()),
            failed={name: state.failure for name, state in self.states().items() if not state.in_service},
            num_bytes=manifest.num_bytes,
            publish_s=publish_s,
            pull_s=pull_s,
            canary=reports,
        )

    def in_service(self) -> list[str]:
        """Engines that hold the newest version and may be given requests."""
        with self._lock:
            return [name for name, state in self._states.items() if state.in_service]

    def states(self) -> dict[str, TargetState]:
        with self._lock:
            return dict(self._states)

    def versions(self) -> dict[str, PolicyVersion | None]:
        return {name: state.version for name, state in self.states().items()}

    def add(self, target: PullTarget) -> None:
        """An engine that joins (or was relaunched). It is out of service until the next sync has reached it."""
        with self._lock:
            self._targets[target.name] = target
            self._states[target.name] = TargetState(failure="has not pulled yet")
            self._busy.pop(target.name, None)

    def catch_up(self, target: PullTarget, manifest: WeightManifest) -> None:
        """Bring one engine, relaunched or new, to the version that the others hold; WeightSyncError where it fails.

        The trainer takes no part: its canary scores are those of the last sync, for it may be in its next step. So a
        transport where both ends move at once cannot do this.
        """
        self.add(target)
        futures = {target.name: target.pull(manifest)}
        wait(futures.values(), timeout=self.config.timeout_s)
        self._settle(target.name, futures[target.name], manifest)
        if self.canary is not None and self._expected is not None and target.name in self.in_service():
            self._compare([target.name], manifest.version, self._expected)
        state = self.states()[target.name]
        if not state.in_service:
            raise WeightSyncError(
                f"{target.name} did not come to version {manifest.version}: {state.failure}"
            )

    def remove(self, name: str) -> None:
        with self._lock:
            for table in (self._targets, self._states, self._busy):
                table.pop(name, None)

    def _start_pulls(self, manifest: WeightManifest) -> dict[str, Future[PolicyVersion]]:
        futures = {}
        for name, target in list(self._targets.items()):
            late = self._busy.get(name)
            if late is not None and not late.done():
                # One pull at a time: an engine that still hangs in the last one cannot take part in this.
                self._fail(name, f"still pulling an older version when {manifest.version} was published")
                continue
            try:
                futures[name] = self._busy[name] = target.pull(manifest)
            except Exception as error:  # noqa: BLE001  boundary: a broken engine must not end the run
                self._fail(name, f"{type(error).__name__}: {error}")
        return futures

    def _settle(self, name: str, future: Future[PolicyVersion], manifest: WeightManifest) -> None:
        if not future.done():
            self._fail(name, f"did not take version {manifest.version} within {self.config.timeout_s:g} s")
            return
        error = future.exception()
        if error is not None:
            self._fail(name, f"{type(error).__name__}: {error}")
        elif future.result() != manifest.version:
            self._fail(name, f"took version {manifest.version} but says it holds {future.result()}")
        else:
            with self._lock:
                failures = self._states[name].num_failures
                self._states[name] = TargetState(
                    version=manifest.version, in_service=True, num_failures=failures
                )

    def _prove(
        self, version: PolicyVersion, trainer_logprobs: Callable[[Sequence[TokenIds]], Sequence[Floats]]
    ) -> dict[str, CanaryReport]:
        if self.canary is None:
            raise WeightSyncError(
                "trainer log-probabilities were given, but there is no canary to compare them on"
            )
        self._expected = trainer_logprobs(self.canary.sequences)
        return self._compare(self.in_service(), version, self._expected)

    def _compare(
        self, names: Sequence[str], version: PolicyVersion, expected: Sequence[Floats]
    ) -> dict[str, CanaryReport]:
        """The canary's reports on these engines; those that differ are out of service."""
        assert self.canary is not None
        reports: dict[str, CanaryReport] = {}
        futures = {name: self._targets[name].score(self.canary.sequences) for name in names}
        wait(futures.values(), timeout=self.config.timeout_s)
        for name, future in futures.items():
            if not future.done():
                self._fail(name, f"did not score the canary within {self.config.timeout_s:g} s")
                continue
            error = future.exception()
            if error is None:
                try:
                    reports[name] = self.canary.compare(name, version, future.result(), expected)
                    reports[name].raise_if_stale()
                except WeightSyncError as stale:
                    error = stale
            if error is not None:
                self._fail(name, f"{type(error).__name__}: {error}")
        return reports

    def _fail(self, name: str, reason: str) -> None:
        logger.warning("engine %s is out of service: %s", name, reason)
        with self._lock:
            state = self._states[name]
            self._states[name] = TargetState(
                version=state.version, in_service=False, failure=reason, num_failures=state.num_failures + 1
            )

    def _require_engines(self, version: PolicyVersion) -> None:
        if len(self.in_service()) >= self.config.min_in_service:
            return
        reasons = "; ".join(f"{name}: {s.failure}" for name, s in self.states().items() if not s.in_service)
        raise WeightSyncError(
            f"version {version} reached {len(self.in_service())} of {len(self._targets)} engines, "
            f"{self.config.min_in_service} are needed: {reasons}"
        )


class _UpdatableEngine(Protocol):
    """What a target needs of rill.inference.base.Engine."""

    @property
    def version(self) -> PolicyVersion: ...

    def update_weights(
        self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False
    ) -> None: ...

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]: ...


class LocalTarget:
    """An engine in this process. Each call runs in a daemon thread: a hanging engine hangs nobody else."""

    def __init__(
        self,
        name: str,
        engine: _UpdatableEngine,
        receiver: Receiver,
        shards: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        self.name = name
        self._engine = engine
        self._receiver = receiver
        self._shards = shards

    def pull(self, manifest: WeightManifest) -> Future[PolicyVersion]:
        def work() -> PolicyVersion:
            self._engine.update_weights(self._receiver.pull(manifest, self._shards), manifest.version)
            return self._engine.version

        return in_thread(work, f"rill-pull-{self.name}")

    def score(self, sequences: Sequence[TokenIds]) -> Future[list[Floats]]:
        return in_thread(lambda: self._engine.score(sequences), f"rill-canary-{self.name}")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  boundary: handed to whoever waits on the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
