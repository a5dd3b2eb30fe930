"""The rollout engines as the loop sees them: generate, take new weights, evaluate; and what happens when one is lost.

Weights go from the actor to the engines without the driver (publishing.py), which learns who did not come there. After
each sync every engine compares its log-probabilities of fixed tokens with the trainer's own: the canary (rill.weights).
Whatever all engines do is one call on the whole group.

All recovery is here, in `_bring_back`, on the loop's thread:

    process gone, or new weights not taken ──▶ relaunch ──▶ pull what the others hold ──▶ canary ──▶ generate again

The jobs it held go back to the channel when it dies, so nothing else has to be told. Each engine has
`loop.max_relaunches` tries. An exception inside an engine's call is a bug or bad data and ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rill.errors import PeerDiedError, RillError, RunError, WorkerError, boundary
from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle, Outcome
from rill.telemetry import trace
from rill.types import PolicyVersion, Prompt
from rill.weights import SealedManifest
from rill.workflows.publishing import PublishingWorker, Synced
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
        actor: WorkerGroup[PublishingWorker],
        flow: Flow,
        sync: SyncConfig,
        loop: LoopConfig,
    ) -> None:
        self._rollout = rollout
        self._actor = actor
        self._flow = flow
        self._config = sync
        self._loop = loop
        self._names = [f"{rollout.name}[{rank}]" for rank in range(rollout.size)]
        self._calls: list[EngineCall | None] = [None] * rollout.size
        """generate() of each engine; None between epochs."""
        self._num_calls = 0
        self._relaunches = [0] * rollout.size
        self._relaunched: set[int] = set()
        """In this epoch."""
        self._is_open = False
        self._num_epochs = 0
        self._manifest: SealedManifest | None = None
        """Of the newest weights, once somebody asked for it."""
        answer(actor.on(0).meet(rollout, sync.timeout_s, loop.interrupt), sync.timeout_s)

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
        return self.take_in(answer(self._actor.publish(version), self._loop.step_timeout_s))

    def take_in(self, synced: Synced | None) -> dict[str, float]:
        """How the actor brought new weights to the engines. One that did not come there is started again."""
        assert synced is not None, "the trainer's first rank publishes"
        self._manifest = None
        for name, reason in synced.failed.items():
            log.warning("engine %s is out of service: %s", name, reason)
            self._bring_back(self._names.index(name), reason)
        return {**synced.figures, "sync/relaunches": float(sum(self._relaunches))}

    def manifest(self) -> SealedManifest:
        """The newest weights, as a group that is no engine can pull them by itself."""
        if self._manifest is None:
            self._manifest = answer(self._actor.on(0).manifest(), self._config.timeout_s)
        return self._manifest

    def evaluate(self, prompts: Sequence[Prompt], config: EvalConfig, timeout_s: float) -> list[list[float]]:
        """Rewards of each prompt's samples, in the order of the prompts. Each engine answers its share."""
        size = self._rollout.size
        calls = [self._rollout.on(rank).evaluate(list(prompts), config) for rank in range(size)]
        rewards: list[list[float]] = [[] for _ in prompts]
        for rank, call in enumerate(calls):
            while True:
                try:
                    rewards[rank::size] = call.wait(timeout_s=timeout_s)[0]
                    break
                except PeerDiedError as death:
                    self._bring_back(rank, str(death))
                    call = self._rollout.on(rank).evaluate(list(prompts), config)
        return rewards

    def _bring_back(self, rank: int, reason: str) -> None:
        """Start a lost engine again, with the weights that the others hold; see above."""
        name = self._names[rank]
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
            with boundary(f"relaunch of {name}, which was lost: {first_line}"):
                answer(self._actor.on(0).catch_up(self._rollout, rank), 2 * self._config.timeout_s)
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


def answer(call: Handle, timeout_s: float) -> Any:
    """What the first rank gives. An error of rill's own that it raised is raised here as it is."""
    try:
        return call.wait(timeout_s=timeout_s)[0]
    except WorkerError as error:
        if isinstance(error.__cause__, RillError):
            raise error.__cause__ from None
        raise
