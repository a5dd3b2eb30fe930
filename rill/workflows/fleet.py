"""The rollout engines as the loop sees them: generate, take new weights, evaluate; and who among them is in service.

Weights go from the actor to the engines without passing the driver: only the manifest does. After each sync every
engine answers a canary: its log-probabilities of fixed tokens are compared with the trainer's own (rill.weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from rill.errors import RillError
from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.types import Floats, PolicyVersion, Prompt, TokenIds
from rill.weights import Canary, Tolerance, WeightManifest, WeightSync, WeightSyncConfig
from rill.weights.base import NamedTensors
from rill.workflows.actor import ActorWorker
from rill.workflows.rollout import RolloutWorker
from rill.workflows.sections import EvalConfig, SyncConfig

T = TypeVar("T")


class Fleet:
    def __init__(
        self,
        rollout: WorkerGroup[RolloutWorker],
        actor: WorkerGroup[ActorWorker],
        config: SyncConfig,
        *,
        interrupt: bool,
    ) -> None:
        self._rollout = rollout
        self._actor = ActorSide(actor, config.timeout_s)
        self._config = config
        self._engines = [EngineTarget(rollout, rank, interrupt) for rank in range(rollout.size)]
        self._sync: WeightSync | None = None

    def generate(self, jobs: Channel, rollouts: Channel, outcomes: Channel) -> Handle:
        return self._rollout.generate(jobs, rollouts, outcomes)

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Bring every engine to the actor's weights. One that fails is named and out of service."""
        manifest = self._actor.publish((), version)
        if self._sync is None:
            self._sync = self._open_sync(manifest)
        logprobs = self._actor.logprobs if self._config.canary else None
        report = self._sync.distribute(manifest, logprobs)
        figures = {
            "sync/update_s": report.pull_s,
            "sync/bytes": float(report.num_bytes),
            "sync/engines": float(len(report.in_service)),
        }
        if report.canary:
            figures["sync/canary"] = max(canary.mean for canary in report.canary.values())
        return figures

    def evaluate(self, prompts: Sequence[Prompt], config: EvalConfig, timeout_s: float) -> list[list[float]]:
        """Rewards of each prompt's samples, in the order of the prompts. Each engine answers its share."""
        shares = self._rollout.evaluate(list(prompts), config).wait(timeout_s=timeout_s)
        rewards: dict[str, list[float]] = {}
        for share in shares:
            rewards.update(share)
        return [rewards[prompt.id] for prompt in prompts]

    def _open_sync(self, manifest: WeightManifest) -> WeightSync:
        given = self._config.canary_tolerance
        tolerance = Tolerance(mean=given, largest=10 * given) if given else None
        canary = Canary.random(self._actor.vocab_size(), dtype=manifest.tensors[0].dtype, tolerance=tolerance)
        config = WeightSyncConfig(timeout_s=self._config.timeout_s, min_in_service=len(self._engines))
        return WeightSync(self._actor, self._engines, config, canary=canary)


class ActorSide:
    """The publishing side of rill.weights.sync, held by the actor group."""

    def __init__(self, actor: WorkerGroup[ActorWorker], timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s

    def publish(self, named_tensors: NamedTensors, version: PolicyVersion) -> WeightManifest:
        """The tensors are the actor's own; none are given."""
        del named_tensors
        manifest: WeightManifest = self._actor.publish(version).wait(timeout_s=self._timeout_s)[0]
        return manifest

    def serve(self, manifest: WeightManifest, timeout_s: float = 600.0) -> None:
        self._actor.serve(manifest, timeout_s).wait(timeout_s=timeout_s)

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        scored: list[Floats] = self._actor.logprobs(list(sequences)).wait(timeout_s=self._timeout_s)[0]
        return scored

    def vocab_size(self) -> int:
        return int(self._actor.vocab_size().wait(timeout_s=self._timeout_s)[0])


class EngineTarget:
    """One engine of the rollout group, as rill.weights.sync sees it."""

    def __init__(self, rollout: WorkerGroup[RolloutWorker], rank: int, interrupt: bool) -> None:
        self.name = f"{rollout.name}[{rank}]"
        self._rollout = rollout
        self._rank = rank
        self._interrupt = interrupt

    def pull(self, manifest: WeightManifest) -> Future[PolicyVersion]:
        return _future(self._rollout.on(self._rank).update(manifest, self._interrupt))

    def score(self, sequences: Sequence[TokenIds]) -> Future[list[Floats]]:
        return _future(self._rollout.on(self._rank).score(list(sequences)))


def _future(handle: Handle) -> Future[T]:
    """The only result of a handle on one rank."""
    future: Future[T] = Future()

    def settle(done: Handle) -> None:
        try:
            future.set_result(done.wait(timeout_s=0.0)[0])
        except RillError as error:
            future.set_exception(error)

    handle.on_done(settle)
    return future
