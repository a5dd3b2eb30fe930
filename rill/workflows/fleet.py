"""The rollout engines as the loop sees them: generate, take new weights, evaluate; and what happens when one is lost.

Weights go from the actor to the engines without passing the driver: only the manifest does. After each sync every
engine answers a canary: its log-probabilities of fixed tokens are compared with the trainer's own (rill.weights).

All recovery is here, in `_bring_back`, on the loop's thread:

    process gone, or new weights not taken ──▶ relaunch ──▶ pull what the others hold ──▶ canary ──▶ generate again

The jobs it held go back to the channel when it dies, so nothing else has to be told. Each engine has
`loop.max_relaunches` tries. An exception inside an engine's call is a bug or bad data and ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from rill.errors import PeerDiedError, RillError, RunError, StuckError, boundary
from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry import trace
from rill.types import Floats, PolicyVersion, Prompt, TokenIds
from rill.weights import Canary, Tolerance, WeightManifest, WeightSync, WeightSyncConfig
from rill.weights.base import NamedTensors
from rill.workflows.actor import ActorWorker
from rill.workflows.rollout import RolloutWorker
from rill.workflows.sections import EvalConfig, LoopConfig, SyncConfig

T = TypeVar("T")

log = logging.getLogger(__name__)

EPOCH_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The channels of generation."""

    jobs: Channel
    rollouts: Channel
    outcomes: Channel


class Fleet:
    def __init__(
        self,
        rollout: WorkerGroup[RolloutWorker],
        actor: WorkerGroup[ActorWorker],
        flow: Flow,
        sync: SyncConfig,
        loop: LoopConfig,
    ) -> None:
        self._rollout = rollout
        self._actor = ActorSide(actor, sync.timeout_s)
        self._flow = flow
        self._config = sync
        self._loop = loop
        self._engines = [EngineTarget(rollout, rank, loop.interrupt) for rank in range(rollout.size)]
        self._calls: list[Handle | None] = [None] * rollout.size
        """generate() of each engine; None between epochs."""
        self._relaunches = [0] * rollout.size
        self._relaunched: set[int] = set()
        """In this epoch."""
        self._is_open = False
        self._num_epochs = 0
        self._sync: WeightSync | None = None
        self._manifest: WeightManifest | None = None

    # --- generating ---------------------------------------------------------------------------------------

    @property
    def is_generating(self) -> bool:
        return any(call is not None for call in self._calls)

    def open_epoch(self) -> None:
        """Let every engine take jobs until the epoch of the jobs channel ends."""
        self._is_open = True
        for rank, call in enumerate(self._calls):
            if call is None:
                self._calls[rank] = self._generate(rank)

    def tend(self) -> None:
        """Bring back engines that are gone. Raises what ended an engine in any other way."""
        for rank, call in enumerate(self._calls):
            if call is None or not call.done():
                continue
            try:
                call.wait(timeout_s=0.0)
            except PeerDiedError as death:
                self._bring_back(rank, str(death))
            else:
                self._calls[rank] = self._generate(rank) if self._is_open else None

    def end_epoch(self) -> None:
        """After the jobs channel was told that its epoch ends: wait until the engines have finished it."""
        self._is_open = False
        self._num_epochs += 1
        deadline_s = time.monotonic() + self._loop.step_timeout_s
        for rank in range(self._rollout.size):
            while (call := self._calls[rank]) is not None and not self._serves_next(rank):
                if time.monotonic() > deadline_s:
                    call.wait(timeout_s=0.0)
                with contextlib.suppress(StuckError):
                    call.outcomes(timeout_s=EPOCH_POLL_S)
                self.tend()
        self._relaunched.clear()

    def _serves_next(self, rank: int) -> bool:
        """Whether the engine's call is for the next epoch: its process saw the end of this one, died before it said
        so, and was started again."""
        return rank in self._relaunched and self._flow.jobs.stats()["epochs_drained"] >= self._num_epochs

    def _generate(self, rank: int) -> Handle:
        flow = self._flow
        return self._rollout.on(rank).generate(flow.jobs, flow.rollouts, flow.outcomes)

    # --- weights and evaluation ---------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Bring every engine to the actor's weights. One that does not come there is named and started again."""
        manifest = self._manifest = self._actor.publish((), version)
        if self._sync is None:
            self._sync = self._open_sync(manifest)
        report = self._sync.distribute(manifest, self._actor.logprobs if self._config.canary else None)
        for rank, engine in enumerate(self._engines):
            if engine.name in report.failed:
                self._bring_back(rank, report.failed[engine.name])
        figures = {
            "sync/update_s": report.pull_s,
            "sync/bytes": float(report.num_bytes),
            "sync/engines": float(len(report.in_service)),
            "sync/relaunches": float(sum(self._relaunches)),
        }
        if report.canary:
            figures["sync/canary"] = max(canary.mean for canary in report.canary.values())
        return figures

    def evaluate(self, prompts: Sequence[Prompt], config: EvalConfig, timeout_s: float) -> list[list[float]]:
        """Rewards of each prompt's samples, in the order of the prompts. Each engine answers its share."""
        calls = [self._rollout.on(rank).evaluate(list(prompts), config) for rank in range(self._rollout.size)]
        rewards: dict[str, list[float]] = {}
        for rank, call in enumerate(calls):
            while True:
                try:
                    rewards.update(call.wait(timeout_s=timeout_s)[0])
                    break
                except PeerDiedError as death:
                    self._bring_back(rank, str(death))
                    call = self._rollout.on(rank).evaluate(list(prompts), config)
        return [rewards[prompt.id] for prompt in prompts]

    def _bring_back(self, rank: int, reason: str) -> None:
        """Start a lost engine again, with the weights that the others hold; see above."""
        name = self._engines[rank].name
        first_line = reason.splitlines()[0]
        if self._relaunches[rank] >= self._loop.max_relaunches:
            raise RunError(
                f"{name} is lost ({first_line}) after {self._relaunches[rank]} relaunches (loop.max_relaunches)"
            )
        self._relaunches[rank] += 1
        self._relaunched.add(rank)
        log.warning("%s is lost: %s; relaunch %d", name, first_line, self._relaunches[rank])
        with trace.span("relaunch", lane="loop", engine=name):
            self._rollout.relaunch(rank, timeout_s=self._loop.step_timeout_s)
            if self._sync is not None and self._manifest is not None:
                with boundary(f"relaunch of {name}, which was lost: {first_line}"):
                    self._sync.catch_up(self._engines[rank], self._manifest)
        if self._calls[rank] is not None:
            self._calls[rank] = self._generate(rank)
        log.warning("%s is back in service", name)

    def _open_sync(self, manifest: WeightManifest) -> WeightSync:
        given = self._config.canary_tolerance
        tolerance = Tolerance(mean=given, largest=10 * given) if given else None
        canary = Canary.random(self._actor.vocab_size(), dtype=manifest.tensors[0].dtype, tolerance=tolerance)
        # No engine need be in service: those that are not are started again here, or end the run.
        config = WeightSyncConfig(timeout_s=self._config.timeout_s, min_in_service=0)
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
