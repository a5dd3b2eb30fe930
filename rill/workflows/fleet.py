"""The rollout engines as the loop sees them: generate, take new weights, evaluate; and what happens when one is lost.

Weights go from the actor to the engines without passing the driver: only the sealed manifest does. After each sync
every engine compares its log-probabilities of fixed tokens with the trainer's own: the canary (rill.weights). Whatever
all engines do is one call on the whole group.

All recovery is here, in `_bring_back`, on the loop's thread:

    process gone, or new weights not taken ──▶ relaunch ──▶ pull what the others hold ──▶ canary ──▶ generate again

The jobs it held go back to the channel when it dies, so nothing else has to be told. Each engine has
`loop.max_relaunches` tries. An exception inside an engine's call is a bug or bad data and ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rill.errors import PeerDiedError, RunError, boundary
from rill.runtime.call import Outcome
from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry import trace
from rill.types import PolicyVersion, Prompt
from rill.weights import (
    Pulled,
    SealedManifest,
    WeightManifest,
    WeightSync,
    WeightSyncConfig,
)
from rill.weights.buckets import NamedTensors
from rill.workflows.actor import ActorWorker
from rill.workflows.rollout import RolloutWorker
from rill.workflows.sections import EvalConfig, LoopConfig, SyncConfig

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
        self._engines = EngineGroup(rollout, loop.interrupt)
        self._calls: list[EngineCall | None] = [None] * rollout.size
        """generate() of each engine; None between epochs."""
        self._num_calls = 0
        self._relaunches = [0] * rollout.size
        self._relaunched: set[int] = set()
        """In this epoch."""
        self._is_open = False
        self._num_epochs = 0
        # No engine need be in service: those that are not are started again here, or end the run.
        self._sync = WeightSync(
            self._actor, self._engines, WeightSyncConfig(timeout_s=sync.timeout_s, min_in_service=0)
        )
        self._manifest: SealedManifest | None = None

    # --- generating ---------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Between `open_epoch` and `end_epoch`. An engine's call may outlast the epoch: see `_serves_next`."""
        return self._is_open

    def open_epoch(self) -> None:
        """Let every engine take jobs until the epoch of the jobs channel ends."""
        self._is_open = True
        self._generate([rank for rank, call in enumerate(self._calls) if call is None])

    def tend(self) -> None:
        """Bring back engines that are gone. Raises what ended an engine in any other way."""
        for rank, outcome in self._ended():
            if isinstance(outcome.error, PeerDiedError):
                self._bring_back(rank, str(outcome.error))
            elif outcome.error is not None:
                raise outcome.error
            elif self._is_open and self._num_drained() <= self._num_epochs:
                self._generate([rank])  # started again, it has met the end of an epoch before this one
            else:
                self._calls[rank] = None

    def put_back(self) -> None:
        """Stop what engines still generate in this epoch; it goes back to the feeder with the tokens it has."""
        ordinals = [0 if call is None else call.ordinal for call in self._calls]
        for outcome in self._rollout.put_back(ordinals).outcomes(timeout_s=self._config.timeout_s):
            if outcome.error is not None and not isinstance(outcome.error, PeerDiedError):
                raise outcome.error

    def end_epoch(self) -> None:
        """After the jobs channel was told that its epoch ends: wait until the engines have finished it."""
        self._is_open = False
        self._num_epochs += 1
        deadline_s = time.monotonic() + self._loop.step_timeout_s
        while call := self._unfinished():
            if time.monotonic() > deadline_s:
                call.handle.wait(timeout_s=0.0)
            call.handle.ended(EPOCH_POLL_S)
            self.tend()
        self._relaunched.clear()

    def _unfinished(self) -> EngineCall | None:
        """A call that still belongs to the epoch that ends."""
        for rank, call in enumerate(self._calls):
            if call is not None and not self._serves_next(rank):
                return call
        return None

    def _serves_next(self, rank: int) -> bool:
        """Whether the engine's call is for the next epoch: its process saw the end of this one, died before it said
        so, and was started again."""
        return rank in self._relaunched and self._num_drained() >= self._num_epochs

    def _num_drained(self) -> int:
        """Epochs of the jobs channel that are over: one more than were ended here where end_epoch() is to come."""
        num_drained: int = self._flow.jobs.stats()["epochs_drained"]
        return num_drained

    def _generate(self, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        self._num_calls += 1
        flow, ordinal = self._flow, self._num_calls
        handle = self._rollout.on(*ranks).generate(flow.jobs, flow.rollouts, flow.outcomes, ordinal)
        for index, rank in enumerate(ranks):
            self._calls[rank] = EngineCall(handle, index, ordinal)

    def _ended(self) -> Iterator[tuple[int, Outcome]]:
        """Engines whose generate() is over, with what became of it."""
        handles = {call.ordinal: call.handle for call in self._calls if call is not None}
        answers = {ordinal: handle.so_far() for ordinal, handle in handles.items()}
        for rank, call in enumerate(list(self._calls)):
            if call is not None and (outcome := answers[call.ordinal][call.index]) is not None:
                yield rank, outcome

    # --- weights and evaluation ---------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Bring every engine to the actor's weights as they are."""
        return self.distribute(self._actor.publish_sealed(version))

    def distribute(self, manifest: SealedManifest | None) -> dict[str, float]:
        """Bring every engine to published weights. One that does not come there is named and started again."""
        assert manifest is not None, "the trainer's first rank publishes"
        self._manifest = manifest
        report = self._sync.distribute(manifest)
        for name, reason in report.failed.items():
            self._bring_back(self._engines.names.index(name), reason)
        figures = {
            "sync/update_s": report.pull_s,
            "sync/bytes": float(report.num_bytes),
            "sync/engines": float(len(report.in_service)),
            "sync/relaunches": float(sum(self._relaunches)),
        }
        if report.canary:
            figures["sync/canary"] = max(report.canary.values())
        return figures

    def manifest(self) -> SealedManifest:
        """The newest weights, as a group that is no engine can pull them by itself."""
        assert self._manifest is not None, "nothing is published before the loop runs"
        return self._actor.for_one(self._manifest)

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
        name = self._engines.names[rank]
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
                    self._sync.catch_up(name, self._actor.for_one(self._manifest))
        if self._calls[rank] is not None:
            self._generate([rank])
        log.warning("%s is back in service", name)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One engine's part in a call of generate()."""

    handle: Handle
    index: int
    ordinal: int
    """Counts the calls, so that an engine knows which of them is to be put back."""


class ActorSide:
    """The publishing side of rill.weights.sync, held by the actor group."""

    def __init__(self, actor: WorkerGroup[ActorWorker], timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s

    def publish(self, named_tensors: NamedTensors, version: PolicyVersion) -> WeightManifest:
        """The tensors are the actor's own; none are given."""
        del named_tensors
        return self.publish_sealed(version).open()

    def publish_sealed(self, version: PolicyVersion) -> SealedManifest:
        manifest: SealedManifest = self._actor.publish(version).wait(timeout_s=self._timeout_s)[0]
        return manifest

    def serve(self, manifest: WeightManifest, timeout_s: float = 600.0) -> None:
        self._actor.serve(manifest, timeout_s).wait(timeout_s=timeout_s)

    def for_one(self, manifest: SealedManifest) -> SealedManifest:
        """The trainer stands between two steps whenever the loop brings an engine back, so it can take part."""
        if not manifest.is_collective:
            return manifest
        own: SealedManifest = self._actor.for_one(manifest).wait(timeout_s=self._timeout_s)[0]
        return own


class EngineGroup:
    """The engines of the rollout group, as rill.weights.sync sees them."""

    def __init__(self, rollout: WorkerGroup[RolloutWorker], interrupt: bool) -> None:
        self.names: Sequence[str] = [f"{rollout.name}[{rank}]" for rank in range(rollout.size)]
        self._rollout = rollout
        self._interrupt = interrupt

    def pull(self, names: Sequence[str], manifest: SealedManifest) -> GroupPulls:
        if len(names) == len(self.names):
            return GroupPulls(self.names, self._rollout.update(manifest, self._interrupt))
        wanted = set(names)
        ranks = [rank for rank, name in enumerate(self.names) if name in wanted]
        if not ranks:
            return GroupPulls([], None)
        handle = self._rollout.on(*ranks).update(manifest, self._interrupt)
        return GroupPulls([self.names[rank] for rank in ranks], handle)


class GroupPulls:
    """rill.weights.sync.Pulls of one call on several engines."""

    def __init__(self, names: Sequence[str], handle: Handle | None) -> None:
        self._names = names
        self._handle = handle

    def ended(self, timeout_s: float) -> Mapping[str, Pulled | Exception]:
        if self._handle is None:
            return {}
        if timeout_s > 0:
            self._handle.ended(timeout_s)
        outcomes = zip(self._names, self._handle.so_far(), strict=True)
        return {name: outcome.error or outcome.value for name, outcome in outcomes if outcome is not None}
