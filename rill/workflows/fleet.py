"""Groups whose calls last for an epoch, as the driver sees them: engines and environment workers, and what happens when
one of them is lost.

    no environment group:  rollout.generate ◀── tasks
    with one:              env.run ◀── tasks,   rollout.serve ◀── requests ◀── env

Weights go from the actor to the engines without the driver (publishing.py), which learns who did not come there. After
each sync every engine compares its log-probabilities of fixed tokens with the trainer's own: the canary (rill.weights).

All recovery is here, in `_bring_back`, on the driver's thread:

    process gone, or new weights not taken ──▶ relaunch ──▶ pull what the others hold ──▶ canary ──▶ called again

What it held goes back to its channel when it dies, so nothing else has to be told. Each rank has `loop.max_relaunches`
tries. An exception inside a call is a bug or bad data and ends the run.

Engines that join go the same way, from `add` on; one that leaves, or was told to by a SIGTERM, has put down what it
sampled and is not started again, unless it is the last.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rill.errors import PeerDiedError, RillError, RunError, UserError, WorkerError, boundary
from rill.planning.elastic import Scaler
from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle, Outcome
from rill.telemetry import trace
from rill.telemetry.requests import answer_all
from rill.types import PolicyVersion
from rill.weights import SealedManifest
from rill.weights.publishing import PublishingWorker, Synced
from rill.workflows.config import LoopConfig, SyncConfig
from rill.workflows.records import Channels, Flows, Sealed
from rill.workflows.rollout import EVERY_EPOCH, LEFT_CODE, RolloutWorker

log = logging.getLogger(__name__)

EPOCH_POLL_S = 1.0
DEATH_S = 3.0
"""What a lost process leaves behind may fail before its death is known; so long is waited for the news of it."""
NOTICE_S = 30.0
"""What an engine that leaves has to put down what it sampled."""


class Engines(NamedTuple):
    """The rollout group, with the environments in it or in a group beside it: a language model's engines, or a robot's
    policy and its simulators."""

    group: WorkerGroup[Any]
    env: WorkerGroup[Any] | None = None


class Door(NamedTuple):
    """Where engines come in and go out: by what people ask of the run (rill.telemetry.requests), or by [elastic]."""

    run_dir: Path
    berth: Callable[[str], str]
    """Where engines may join, for the devices that were asked for."""
    changed: Callable[[], None]
    """They have joined or left."""
    scaler: Scaler
    num_prompts: Callable[[], int]
    """That wait or are being answered."""


class RankCall(NamedTuple):
    """One rank's part in a call."""

    handle: Handle
    place: int


class Crew:
    """One group and its calls that last for an epoch of a channel, one to a rank. Each call meets one end of an epoch;
    a rank that dies meets it when it is called again."""

    def __init__(
        self, group: WorkerGroup[Any], call: Callable[[Sequence[int]], Handle], max_relaunches: int
    ) -> None:
        self.group = group
        self.num_relaunches: Counter[int] = Counter()
        """By rank."""
        self._call = call
        self._max_relaunches = max_relaunches
        self._calls: dict[int, RankCall] = {}
        """Of the ranks that work on the epoch."""

    def name(self, rank: int) -> str:
        return f"{self.group.name}[{rank}]"

    def begin(self, ranks: Sequence[int]) -> None:
        """Let these ranks take what lies in the channel until its epoch ends."""
        handle = self._call(ranks)
        for index, rank in enumerate(ranks):
            self._calls[rank] = RankCall(handle, index)

    def tend(self, bring_back: Callable[[int, str], None]) -> None:
        """Bring back ranks that are gone. Raises what ended a rank in any other way."""
        for rank, outcome in self._ended():
            if isinstance(outcome.error, PeerDiedError):
                bring_back(rank, str(outcome.error))
            elif outcome.error is not None:
                raise outcome.error
            else:
                del self._calls[rank]

    def unfinished(self) -> Handle | None:
        """A call that still works on the epoch."""
        return next((call.handle for call in self._calls.values()), None)

    def relaunch(self, rank: int, reason: str, timeout_s: float, catch_up: Callable[[], None]) -> None:
        """In a new process, and in another where that is lost before it came to where the others are (`catch_up`).
        `recall` lets it go on."""
        name = self.name(rank)
        while True:
            count = self.num_relaunches[rank]
            if count >= self._max_relaunches:
                raise RunError(f"{name} is lost ({reason}) after {count} relaunches (loop.max_relaunches)")
            self.num_relaunches[rank] += 1
            log.warning("%s is lost: %s; relaunch %d", name, reason, count + 1)
            try:
                with boundary(f"relaunch of {name}, which was lost: {reason}"):
                    self.group.relaunch(rank, timeout_s=timeout_s)
                    catch_up()
                return
            except RillError as error:
                if not self._has_died(rank):
                    raise
                reason = str(error).splitlines()[0]

    def _has_died(self, rank: int) -> bool:
        """What a death leads to may be known before the death is."""
        deadline_s = time.monotonic() + DEATH_S
        while rank not in self.group.lost():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.1)
        return True

    def recall(self, rank: int) -> None:
        if rank in self._calls:
            self.begin([rank])
        log.warning("%s is back in service", self.name(rank))

    def see_off(self, rank: int) -> None:
        """Out of the group; what it held is somebody else's."""
        self._calls.pop(rank, None)
        self.group.remove(rank, notice_s=NOTICE_S)

    def _ended(self) -> Iterator[tuple[int, Outcome]]:
        """Ranks whose call is over, with what became of it."""
        answers = {id(call.handle): call.handle.so_far() for call in self._calls.values()}
        for rank, call in list(self._calls.items()):
            if (outcome := answers[id(call.handle)][call.place]) is not None:
                yield rank, outcome


class Fleet:
    """The crews of a run, and the way of new weights to its engines."""

    def __init__(
        self,
        engines: Engines,
        flows: Flows,
        channels: Channels,
        actor: WorkerGroup[PublishingWorker],
        sync: SyncConfig,
        loop: LoopConfig,
        door: Door | None = None,
    ) -> None:
        self._rollout: WorkerGroup[RolloutWorker] = engines.group
        self._actor = actor
        self._config = sync
        self._loop = loop
        self._door = door
        self.is_open = False
        """Between `open_epoch` and `end_epoch`."""
        self._has_trainer = True
        """Who gives a new engine its weights."""
        self._manifest: SealedManifest | None = None
        """Of the newest weights, once somebody asked for it."""
        self._requests: Channel | None = None
        if engines.env is None:
            self._engines = self._crew(self._rollout, "generate", flows)
            self._crews = [self._engines]
        else:
            requests = self._requests = channels.bounded("requests")
            answers = tuple(channels.endless(f"answers[{rank}]") for rank in range(engines.env.size))
            self._engines = self._crew(self._rollout, "serve", requests, answers)
            self._crews = [self._crew(engines.env, "run", flows, requests, answers), self._engines]
        answer(actor.on(0).meet(self._rollout, sync.timeout_s, loop.interrupt), sync.timeout_s)

    def _crew(self, group: WorkerGroup[Any], method: str, *arguments: Any) -> Crew:
        sealed = [Sealed(argument) for argument in arguments]

        def call(ranks: Sequence[int]) -> Handle:
            chosen = group if tuple(ranks) == group.ranks else group.on(*ranks)
            return chosen.call(method, *sealed)

        return Crew(group, call, self._loop.max_relaunches)

    def open_epoch(self) -> None:
        self.is_open = True
        for crew in self._crews:
            crew.begin(crew.group.ranks)

    def tend(self) -> None:
        if self.is_open and self._door is not None:
            self._door.scaler.look(self._door.num_prompts)
            if self._loop.max_lag > 0:
                self.attend()
        for crew in self._crews:
            crew.tend(lambda rank, reason, crew=crew: self._bring_back(crew, rank, reason))  # type: ignore[misc]

    def stop(self, epoch: int) -> None:
        """Stop what engines sample for tasks of this epoch; it goes back to the controller with the tokens it has."""
        for outcome in self._rollout.stop(epoch).outcomes(timeout_s=self._config.timeout_s):
            if outcome.error is not None and not isinstance(outcome.error, PeerDiedError):
                raise outcome.error

    def end_epoch(self) -> None:
        """After the tasks channel was told that its epoch ends: wait until everybody has finished it."""
        self.is_open = False
        for crew in self._crews:
            deadline_s = time.monotonic() + self._loop.step_timeout_s
            if crew is self._engines and self._requests is not None:
                self._requests.end()  # nobody is left who could ask
            while call := crew.unfinished():
                if time.monotonic() > deadline_s:
                    call.wait(timeout_s=0.0)
                call.ended(EPOCH_POLL_S)
                self.tend()

    def rest(self, tasks: Channel, timeout_s: float) -> None:
        """Nobody is left who wants what comes of the epoch: end it now. What was sampled is in the token log. Raises
        where somebody is lost meanwhile, or does not come to an end."""
        self._has_trainer = False
        if self.is_open:
            self.stop(EVERY_EPOCH)
            tasks.end()
            self._loop = self._loop.model_copy(update={"step_timeout_s": timeout_s})
            self.end_epoch()

    # --- engines that come and go -------------------------------------------------------------------------

    def attend(self, step: int = 0) -> None:
        """Let in and see off engines, as people have asked or [elastic] says; `step`: the newest that is done, where it
        is known. Between two epochs, or in one that only the driver ends: an engine takes part in the epochs that end
        after it was there."""
        if (door := self._door) is not None:
            answer_all(
                door.run_dir, lambda r: self.join(r.devices) if r.leaving is None else self.leave(r.leaving)
            )
            door.scaler.scale(step, lambda: self._rollout.ranks, self.join, self.leave)

    def join(self, devices: str) -> str:
        """More engines, with the weights that the others hold; in the middle of an epoch they take part in it."""
        assert self._door is not None, "who joins comes through the door"
        ranks = self._rollout.add(placement=self._door.berth(devices), timeout_s=self._loop.step_timeout_s)
        try:
            self.catch_up(ranks)
        except RillError:
            self._rollout.remove(*ranks)
            raise
        if self.is_open:
            self._engines.begin(ranks)
        self._door.changed()
        names = ", ".join(map(self._engines.name, ranks))
        log.warning("%s joined", names)
        return f"{names} joined: {self._rollout.size} engines"

    def leave(self, rank: int) -> str:
        """UserError: there is no such engine, or no other."""
        self._rollout.on(rank)
        if self._rollout.size == 1:
            raise UserError(f"{self._engines.name(rank)} is the only engine: let another join first")
        self._see_off(rank, "it was asked to")
        return f"{self._engines.name(rank)} left: {self._rollout.size} engines"

    def _see_off(self, rank: int, reason: str) -> None:
        self._engines.see_off(rank)
        if self._door is not None:
            self._door.changed()
        log.warning("%s left: %s; others go on with what it held", self._engines.name(rank), reason)

    # --- weights ------------------------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Bring every engine to the actor's weights as they are."""
        return self.take_in(answer(self._actor.publish(version), self._loop.step_timeout_s))

    def catch_up(self, ranks: Sequence[int]) -> None:
        """Bring these engines to what the actor published last."""
        for rank in ranks:
            answer(self._actor.on(0).catch_up(self._rollout, rank), 2 * self._config.timeout_s)

    def take_in(self, synced: Synced | None) -> dict[str, float]:
        """How the actor brought new weights to the engines. One that did not come there is started again."""
        assert synced is not None, "the trainer's first rank publishes"
        self._manifest = None
        for name, reason in synced.failed.items():
            log.warning("engine %s is out of service: %s", name, reason)
            ranks = {self._engines.name(rank): rank for rank in self._rollout.ranks}
            if name in ranks:
                self._bring_back(self._engines, ranks[name], reason)
        relaunches = sum(crew.num_relaunches.total() for crew in self._crews)
        return {**synced.metrics, "sync/relaunches": float(relaunches)}

    def manifest(self) -> SealedManifest:
        """The newest weights, as a group that is no engine can pull them by itself."""
        if self._manifest is None:
            self._manifest = answer(self._actor.on(0).manifest(), self._config.timeout_s)
        return self._manifest

    def _bring_back(self, crew: Crew, rank: int, reason: str) -> None:
        """Start a lost rank again; an engine with the weights that the others hold. See above."""
        name, first_line = crew.name(rank), reason.splitlines()[0]
        if not self._has_trainer:
            raise PeerDiedError(reason)
        if crew is self._engines and f"exit code {LEFT_CODE}" in first_line and crew.group.size > 1:
            self._see_off(rank, "it was told to go (SIGTERM)")
            return

        def catch_up() -> None:
            if crew is self._engines:
                self.catch_up([rank])

        with trace.span("relaunch", lane="loop", worker=name):
            crew.relaunch(rank, first_line, self._loop.step_timeout_s, catch_up)
        crew.recall(rank)


def answer(call: Handle, timeout_s: float) -> Any:
    """What the first rank gives. An error of rill's own that it raised is raised here as it is."""
    try:
        return call.wait(timeout_s=timeout_s)[0]
    except WorkerError as error:
        if isinstance(error.__cause__, RillError):
            raise error.__cause__ from None
        raise
