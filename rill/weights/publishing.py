"""The trainer's end of weight sync: whoever publishes brings the engines there, without the driver in between.

    train ──▶ publish ──▶ update on every engine at once: pull, prove it ──▶ Synced: who did not come, a few metrics

Manifests, proofs and the engines' answers stay between the trainer's first rank and the engines. The driver learns who
failed, starts it again (rill.workflows.fleet) and asks for `catch_up`.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rill.errors import TrainingError
from rill.runtime.context import current
from rill.runtime.device.lock import groups_in_line
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.runtime.worker import Worker, concurrent
from rill.types import PolicyVersion
from rill.weights.base import Publisher
from rill.weights.manifest import SealedManifest
from rill.weights.sync import Pulled, WeightSync


class Synced(NamedTuple):
    """How a sync ended, for the driver; a tuple, because there is one at every step."""

    metrics: Mapping[str, float]
    failed: Mapping[str, str]
    """Engines that did not come to the version, with the reason."""


class PublishingWorker(Worker):
    """A group whose first rank publishes weights and holds the line to the engines. All ranks gather."""

    publisher: Publisher | None
    """Rank 0's."""
    engines: Engines | None = None
    """Rank 0's, once they have met."""
    _has_failed = False
    """In the middle of a step."""

    @abstractmethod
    def _gather(self, version: PolicyVersion) -> SealedManifest | None:
        """Put the weights where engines reach them, inside the caller's turn on the devices. Rank 0 returns what
        engines must know, with what they must answer to a canary."""

    def meet(self, rollout: WorkerGroup[Any], timeout_s: float, interrupt: bool) -> None:
        """On rank 0, once, and again when groups have moved. `timeout_s`: for an engine to take a version;
        `interrupt`: what it samples goes on under the new one."""
        assert self.publisher is not None, "rank 0 publishes"
        if self.engines is None:
            self.engines = Engines(self.publisher, rollout, timeout_s, interrupt)
        self.engines.rollout = rollout

    def train(self, source: Any, version: PolicyVersion) -> Mapping[str, float]:
        """One step from `version`, on the samples of `source`; its metrics. `publish` may be called behind it."""
        self._has_failed = True
        metrics = self._train(source, version)
        self._has_failed = False
        return metrics

    @abstractmethod
    def _train(self, source: Any, version: PolicyVersion) -> Mapping[str, float]: ...

    def publish(self, version: PolicyVersion) -> Synced | None:
        """Bring the engines to the weights as they are, once those that were lost are back (the driver sees to it)."""
        if self._has_failed:
            raise TrainingError(f"the step to version {version} failed: there is nothing to publish")
        began_s = time.monotonic()
        with self.device_lock():
            manifest = self._gather(version)
        if manifest is None:
            return None
        with self.timer("sync"):  # outside the turn on the devices: engines that share them need their own
            synced = self._engines().bring_to(manifest)
        return synced._replace(metrics={**synced.metrics, "time/sync_s": time.monotonic() - began_s})

    @concurrent
    def catch_up(self, rollout: WorkerGroup[Any], rank: int) -> None:
        """Bring one engine, started again, to the version that the others hold, if there is one. `rollout`: where they
        are now."""
        self._engines().catch_up(rollout, rank)

    @concurrent
    def manifest(self) -> SealedManifest:
        """The newest weights, as a group that is no engine can pull them by itself."""
        return self._engines().manifest_for_one()

    def _engines(self) -> Engines:
        assert self.engines is not None, "rank 0 meets the engines before anything is published"
        return self.engines


class Engines:
    """The engines of a run, as the publishing rank sees them: rill.weights.sync.PullTargets of the rollout group, with
    the ranks that it has at the moment."""

    def __init__(
        self, publisher: Publisher, rollout: WorkerGroup[Any], timeout_s: float, interrupt: bool
    ) -> None:
        self._publisher = publisher
        self.rollout = rollout
        self._interrupt = interrupt
        self._sync = WeightSync(publisher, self, timeout_s=timeout_s)
        self._manifest: SealedManifest | None = None
        self._lock = threading.Lock()
        """An engine may be brought back while the trainer waits for samples, or publishes."""

    def bring_to(self, manifest: SealedManifest) -> Synced:
        with self._lock:
            self._manifest = manifest
            report = self._sync.distribute(manifest)
        metrics = {
            "sync/update_s": report.pull_s,
            "sync/bytes": float(report.num_bytes),
            "sync/engines": float(len(report.in_service)),
        }
        if report.canary:
            metrics["sync/canary"] = max(report.canary.values())
        return Synced(metrics, report.failed)

    def catch_up(self, rollout: WorkerGroup[Any], rank: int) -> None:
        with self._lock:
            self.rollout = rollout
            if self._manifest is not None:
                self._sync.catch_up(self._name_of(rank), self.manifest_for_one())

    def manifest_for_one(self) -> SealedManifest:
        manifest = self._manifest
        assert manifest is not None, "nothing is published before the loop runs"
        if not manifest.is_collective:
            return manifest
        return manifest.with_content(self._publisher.for_one(manifest.open()))

    @property
    def names(self) -> Sequence[str]:
        return [self._name_of(rank) for rank in self.rollout.ranks]

    def pull(self, names: Sequence[str], manifest: SealedManifest) -> GroupPulls:
        wanted = {rank: name for rank in self.rollout.ranks if (name := self._name_of(rank)) in names}
        if not wanted:
            return GroupPulls([], None)
        handle = self.rollout.on(*wanted).update(manifest, self._interrupt)
        return GroupPulls(list(wanted.values()), handle)

    def _name_of(self, rank: int) -> str:
        return f"{self.rollout.name}[{rank}]"


class GroupPulls:
    """rill.weights.sync.Pulls of one call on several engines."""

    def __init__(self, names: Sequence[str], handle: Handle | None) -> None:
        self._names = names
        self._handle = handle

    def ended(self, timeout_s: float) -> Mapping[str, Pulled | Exception]:
        """The time of those that wait for devices which others have their turn on (a critic that still trains) does
        not count: that wait has a deadline of its own, the lock's."""
        if self._handle is None:
            return {}
        if timeout_s > 0:
            while not self._handle.ended(timeout_s) and self._is_in_line():
                pass
        outcomes = zip(self._names, self._handle.so_far(), strict=True)
        return {name: outcome.error or outcome.value for name, outcome in outcomes if outcome is not None}

    def _is_in_line(self) -> bool:
        assert self._handle is not None
        group = self._handle.targets[0].group
        return group in groups_in_line(current())
