"""Brings every engine to the trainer's version, and knows which ones are there.

    sync(named_weights, version)
        publish ──▶ manifest ──▶ every engine pulls (beside one another, one deadline), proves it ──▶ in service
                                     └── failed or late: named, out of service, tried again at the next sync

An engine that is out of service holds an older version and must get no new requests; the run goes on with the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rill.errors import RillError, StaleWeightsError, WeightSyncError
from rill.types import Floats, PolicyVersion, TokenIds
from rill.weights.base import Publisher
from rill.weights.buckets import NamedTensors
from rill.weights.canary import Canary, CanaryProof
from rill.weights.manifest import SealedManifest

logger = logging.getLogger(__name__)


class Pulled(NamedTuple):
    """What an engine says after a pull; a tuple, because there is one from every engine at every step."""

    version: PolicyVersion
    canary_mean: float | None
    """Mean difference of its log-probabilities from the trainer's, in nats; None: there was no canary."""
    stale: str
    """Why its answers show other weights; empty: they do not."""

    @staticmethod
    def proven(
        name: str,
        manifest: SealedManifest,
        version: PolicyVersion,
        score: Callable[[Sequence[TokenIds]], Sequence[Floats]],
    ) -> Pulled:
        """What an engine that holds `version` says, after it was asked what the manifest's proof asks."""
        proof = manifest.open_proof()
        if proof is None:
            return Pulled(version, None, "")
        try:
            report = proof.check(name, manifest.version, score)
            report.raise_if_stale()
        except StaleWeightsError as stale:
            return Pulled(version, None, str(stale))
        return Pulled(version, report.mean, "")


class Pulls(Protocol):
    """Pulls under way."""

    def ended(self, timeout_s: float) -> Mapping[str, Pulled | Exception]:
        """What became of those that end within the time, by name."""
        ...


class PullTargets(Protocol):
    """The engines, wherever they run."""

    @property
    def names(self) -> Sequence[str]: ...

    def pull(self, names: Sequence[str], manifest: SealedManifest) -> Pulls:
        """Start pulling on these engines; each gives the manifest's proof once it holds the version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """What is known of one engine."""

    version: PolicyVersion | None = None
    failure: str = ""
    """Why it is out of service."""

    @property
    def in_service(self) -> bool:
        return not self.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    version: PolicyVersion
    in_service: tuple[str, ...]
    failed: Mapping[str, str]
    """Engines out of service, with the reason."""
    num_bytes: int
    pull_s: float
    canary: Mapping[str, float] = field(default_factory=dict)
    """Mean differences of log-probabilities, in nats, by engine."""


class WeightSync:
    """Tracks the engines of a run."""

    def __init__(
        self,
        publisher: Publisher,
        targets: PullTargets,
        *,
        timeout_s: float = 300.0,
        canary: Canary | None = None,
    ) -> None:
        """`timeout_s`: an engine that has not taken the weights by then is out of service until it has."""
        self.timeout_s = timeout_s
        self.publisher = publisher
        self.canary = canary
        self._targets = targets
        self._states: dict[str, TargetState] = {}
        self._late: dict[str, Pulls] = {}
        """Engines that had not ended their last pull when it was looked at."""
        self._lock = threading.Lock()
        self._follow_targets()

    def sync(
        self,
        named_tensors: NamedTensors,
        version: PolicyVersion,
        trainer_logprobs: Callable[[Sequence[TokenIds]], Sequence[Floats]] | None = None,
    ) -> SyncReport:
        """Publish and bring every engine to `version`. Engines that fail are in the report; WeightSyncError: all have.
        `trainer_logprobs` scores the canary's sequences with the weights just published."""
        manifest = self.publisher.publish(named_tensors, version)
        proof = None
        if trainer_logprobs is not None and self.canary is not None:
            proof = CanaryProof(canary=self.canary, expected=trainer_logprobs(self.canary.sequences))
        report = self.distribute(manifest.seal(proof))
        if not report.in_service:
            reasons = "; ".join(f"{name}: {failure}" for name, failure in report.failed.items())
            raise WeightSyncError(f"version {version} reached 0 of {len(report.failed)} engines: {reasons}")
        return report

    def distribute(self, manifest: SealedManifest) -> SyncReport:
        """The second half of sync(), for a manifest that was published elsewhere; with no engine left, too."""
        started = time.perf_counter()
        names = self._idle_engines(self._follow_targets(), manifest)
        pulls = self._targets.pull(names, manifest)
        if manifest.is_collective:
            self._serve(manifest)
        ended = pulls.ended(max(0.0, self.timeout_s - (time.perf_counter() - started)))
        reports = self._settle(names, pulls, ended, manifest)
        states = self.states()
        failed = {name: state.failure for name, state in states.items() if not state.in_service}
        return SyncReport(
            version=manifest.version,
            in_service=tuple(name for name in states if name not in failed),
            failed=failed,
            num_bytes=manifest.num_bytes,
            pull_s=time.perf_counter() - started,
            canary=reports,
        )

    def catch_up(self, name: str, manifest: SealedManifest) -> None:
        """Bring one engine, relaunched or new, to the version that the others hold; WeightSyncError where it fails.

        `manifest` must be one that an engine can pull by itself (see Publisher.for_one).
        """
        with self._lock:
            self._states[name] = TargetState(failure="has not pulled yet")
            self._late.pop(name, None)
        pulls = self._targets.pull([name], manifest)
        self._settle([name], pulls, pulls.ended(self.timeout_s), manifest)
        state = self.states()[name]
        if not state.in_service:
            raise WeightSyncError(f"{name} did not come to version {manifest.version}: {state.failure}")

    def states(self) -> dict[str, TargetState]:
        with self._lock:
            return dict(self._states)

    def _follow_targets(self) -> list[str]:
        """Their names now: engines join and leave between two syncs."""
        names = list(self._targets.names)
        if len(set(names)) < len(names):
            raise WeightSyncError(f"two engines have one name: {sorted(names)}")
        with self._lock:
            joined = TargetState(failure="has not pulled yet")
            self._states = {name: self._states.get(name, joined) for name in names}
            self._late = {name: pulls for name, pulls in self._late.items() if name in self._states}
        return names

    def _idle_engines(self, names: Sequence[str], manifest: SealedManifest) -> list[str]:
        """One pull at a time: an engine that still hangs in the last one cannot take part in this."""
        idle = []
        for name in names:
            late = self._late.get(name)
            if late is not None and name not in late.ended(0.0):
                self._fail(name, f"still pulling an older version when {manifest.version} was published")
            else:
                self._late.pop(name, None)
                idle.append(name)
        return idle

    def _serve(self, manifest: SealedManifest) -> None:
        """Where the trainer moves together with its engines and one of them breaks off, it fails too: they are named
        one by one when their pulls are looked at."""
        try:
            self.publisher.serve(manifest.open(), self.timeout_s)
        except RillError as error:
            logger.warning("serving version %d: %s", manifest.version, error)

    def _settle(
        self,
        names: Sequence[str],
        pulls: Pulls,
        ended: Mapping[str, Pulled | Exception],
        manifest: SealedManifest,
    ) -> dict[str, float]:
        """Who is in service now; what the canary showed."""
        means: dict[str, float] = {}
        for name in names:
            pulled = ended.get(name)
            if pulled is None:
                self._late[name] = pulls
                self._fail(name, f"did not take version {manifest.version} within {self.timeout_s:g} s")
            elif isinstance(pulled, Exception):
                self._fail(name, f"{type(pulled).__name__}: {pulled}")
            elif pulled.version != manifest.version:
                self._fail(name, f"took version {manifest.version} but says it holds {pulled.version}")
            elif pulled.stale:
                self._fail(name, pulled.stale)
            else:
                with self._lock:
                    self._states[name] = TargetState(version=pulled.version)
                if pulled.canary_mean is not None:
                    means[name] = pulled.canary_mean
        return means

    def _fail(self, name: str, reason: str) -> None:
        logger.warning("engine %s is out of service: %s", name, reason)
        with self._lock:
            self._states[name] = TargetState(version=self._states[name].version, failure=reason)


class PullTarget(Protocol):
    """One engine whose pull blocks, such as a server."""

    @property
    def name(self) -> str: ...

    def pull(self, manifest: SealedManifest) -> Pulled: ...


class ThreadedTargets:
    """Engines side by side. Each pull runs in a daemon thread: a hanging engine hangs nobody else."""

    def __init__(self, targets: Sequence[PullTarget]) -> None:
        self._targets = list(targets)

    @property
    def names(self) -> Sequence[str]:
        return [target.name for target in self._targets]

    def add(self, target: PullTarget) -> None:
        """An engine that joins is out of service until it has pulled: at the next sync, or with WeightSync.catch_up."""
        self._targets.append(target)

    def remove(self, name: str) -> None:
        """An engine that leaves is asked for nothing any more."""
        self._targets = [target for target in self._targets if target.name != name]

    def pull(self, names: Sequence[str], manifest: SealedManifest) -> ThreadedPulls:
        wanted = [target for target in self._targets if target.name in names]
        return ThreadedPulls({target.name: _in_thread(target, manifest) for target in wanted})


def _in_thread(target: PullTarget, manifest: SealedManifest) -> Future[Pulled]:
    """In a daemon thread: what hangs hangs nobody else, and never keeps the process from ending."""
    future: Future[Pulled] = Future()

    def run() -> None:
        try:
            future.set_result(target.pull(manifest))
        except BaseException as error:  # noqa: BLE001  boundary: handed to whoever waits on the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"rill-pull-{target.name}").start()
    return future


class ThreadedPulls:
    def __init__(self, futures: Mapping[str, Future[Pulled]]) -> None:
        self._futures = futures

    def ended(self, timeout_s: float) -> Mapping[str, Pulled | Exception]:
        wait(self._futures.values(), timeout=timeout_s)
        done = {name: future for name, future in self._futures.items() if future.done()}
        return {name: _result_of(future) for name, future in done.items()}


def _result_of(future: Future[Pulled]) -> Pulled | Exception:
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, Exception) else WeightSyncError(repr(error))
