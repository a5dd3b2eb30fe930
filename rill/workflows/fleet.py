"""Groups whose calls last for an epoch, as the driver sees them: engines and environment workers, and what happens when
one of them is lost.

    no environment group:  rollout.generate ◀── tasks
    with one:              env.run ◀── tasks,   rollout.serve ◀── requests ◀── env

Weights go from the actor to the engines without the driver (rill.weights.publishing), which learns who did not come
there. All recovery is here, in `_bring_back`, on the driver's thread:

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
from typing import Any, TypeVar

from rill.errors import PeerDiedError, RillError, RunError, UserError, boundary
from rill.planning.elastic import Scaler
from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.runtime.process.call import Sealed
from rill.telemetry import trace
from rill.telemetry.requests import answer_all, open_requests
from rill.types import PolicyVersion
from rill.weights import SealedManifest
from rill.weights.publishing import Synced
from rill.workers.rollout import EVERY_EPOCH, LEFT_CODE
from rill.workflows.session import NEVER_S, Session

log = logging.getLogger(__name__)

T = TypeVar("T")

TEND_S = 1.0
"""How often engines are looked after while the driver waits for them."""
DEATH_S = 3.0
NOTICE_S = 30.0
"""What an engine that leaves has to put down what it sampled."""


def soon(find: Callable[[], T]) -> T:
    """What is found about a death, now or within DEATH_S: what it leads to may be known before the death is."""
    deadline_s = time.monotonic() + DEATH_S
    while not (found := find()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


class Crew:
    """One group and the call of its method that lasts for an epoch of a channel, on every rank. A call is told which
    epoch: a rank that dies between its end and its answer meets that end again."""

    def __init__(
        self, group: WorkerGroup[Any], max_relaunches: int, channel: Channel, method: str, *arguments: Any
    ) -> None:
        self.group = group
        self.num_relaunches: Counter[int] = Counter()
        """By rank."""
        self._max_relaunches = max_relaunches
        self._channel = channel
        self._method = method
        self._arguments = [Sealed(argument) for argument in arguments]
        self._epoch: int | None = None
        self._calls: dict[int, Handle] = {}
        """By rank, of those that work on the epoch."""

    def name(self, rank: int) -> str:
        return f"{self.group.name}[{rank}]"

    def open_epoch(self) -> None:
        """All ranks begin: with the one that the channel is in, after that with the one after the last."""
        self._epoch = self._channel.stats()["epoch"] if self._epoch is None else self._epoch + 1
        self.begin()

    def begin(self, *ranks: int) -> None:
        """Let these ranks, or all, take what lies in the channel until its epoch ends."""
        chosen = self.group.on(*ranks) if ranks else self.group
        handle = chosen.call(self._method, *self._arguments, self._epoch)
        self._calls |= {target.rank: handle for target in handle.targets}

    def lost(self) -> Iterator[tuple[int, str]]:
        """Ranks that are gone, with the reason; who has ended the epoch is not waited for any more. Raises what ended a
        rank in any other way."""
        for call in list(dict.fromkeys(self._calls.values())):
            for target, outcome in zip(call.targets, call.so_far(), strict=True):
                if outcome is None or self._calls.get(target.rank) is not call:
                    continue
                if outcome.error is None:
                    del self._calls[target.rank]
                elif isinstance(outcome.error, PeerDiedError):
                    yield target.rank, str(outcome.error)
                else:
                    raise outcome.error

    def unfinished(self) -> Handle | None:
        """A call that still works on the epoch."""
        return next(iter(self._calls.values()), None)

    def count_relaunch(self, rank: int, reason: str) -> None:
        """RunError: it was started again too often."""
        name, count = self.name(rank), self.num_relaunches[rank]
        if count >= self._max_relaunches:
            raise RunError(f"{name} is lost ({reason}) after {count} relaunches (loop.max_relaunches)")
        self.num_relaunches[rank] += 1
        log.warning("%s is lost: %s; relaunch %d", name, reason, count + 1)

    def recall(self, rank: int) -> None:
        if rank in self._calls:
            self.begin(rank)
        log.warning("%s is back in service", self.name(rank))

    def see_off(self, rank: int) -> None:
        """Out of the group; what it held is somebody else's."""
        self._calls.pop(rank, None)
        self.group.remove(rank, notice_s=NOTICE_S)


class Fleet:
    """The crews of a run, and the way of new weights to its engines."""

    def __init__(self, session: Session) -> None:
        self.session = session
        engines, env = session.groups["rollout"], session.groups.get("env")
        self._rollout = engines
        self._actor = session.groups["actor"]
        self._sync_s = session.config.sync.timeout_s
        self._loop = session.config.loop
        self._scaler = Scaler(session.config.elastic)
        self.is_open = False
        """Between `open_epoch` and `end_epoch`."""
        self._has_trainer = True
        """Who gives a new engine its weights."""
        self._requests: Channel | None = None
        limit, flows = self._loop.max_relaunches, session.flows
        if env is None:
            self._engines = Crew(engines, limit, flows.tasks, "generate", flows)
            self._crews = [self._engines]
        else:
            requests = self._requests = session.channel("requests", NEVER_S)
            answers = tuple(session.channel(f"answers[{rank}]", NEVER_S) for rank in range(env.size))
            self._engines = Crew(engines, limit, requests, "serve", requests, answers)
            self._crews = [Crew(env, limit, flows.tasks, "run", flows, requests, answers), self._engines]
        open_requests(session.run.path)
        session.ask(self._actor.on(0).meet(engines, self._sync_s, self._loop.interrupt), self._sync_s)

    def open_epoch(self) -> None:
        self.is_open = True
        for crew in self._crews:
            crew.open_epoch()

    def sampling(self) -> Handle | None:
        """A call that lasts until the epoch of the tasks ends; None: it has ended."""
        return self._crews[0].unfinished()

    def tend(self) -> None:
        if self.is_open:
            self._scaler.look(self._num_prompts)
            if self._loop.max_lag > 0:
                self.attend()
        for crew in self._crews:
            for rank, reason in crew.lost():
                self._bring_back(crew, rank, reason)

    def stop(self, epoch: int) -> None:
        """Stop what engines sample for tasks of this epoch; it goes back to the controller with the tokens it has."""
        for outcome in self._rollout.stop(epoch).outcomes(timeout_s=self._sync_s):
            if outcome.error is not None and not isinstance(outcome.error, PeerDiedError):
                raise outcome.error

    def end_epoch(self, timeout_s: float = 0.0) -> None:
        """After the tasks channel was told that its epoch ends: wait until everybody has. 0: as a step may last."""
        self.is_open = False
        for crew in self._crews:
            deadline_s = time.monotonic() + (timeout_s or self._loop.step_timeout_s)
            if crew is self._engines and self._requests is not None:
                self._requests.end()  # nobody is left who could ask
            while call := crew.unfinished():
                if time.monotonic() > deadline_s:
                    call.wait(timeout_s=0.0)
                call.ended(TEND_S)
                self.tend()

    def rest(self, timeout_s: float) -> None:
        """Nobody is left who wants what comes of the epoch: end it now. What was sampled is in the token log. Raises
        where somebody is lost meanwhile, or does not come to an end."""
        self._has_trainer = False
        if self.is_open:
            self.stop(EVERY_EPOCH)
            self.session.flows.tasks.end()
            self.end_epoch(timeout_s)

    # --- engines that come and go -------------------------------------------------------------------------

    def attend(self, step: int = 0) -> None:
        """Let in and see off engines, as people have asked or [elastic] says; `step`: the newest that is done, where it
        is known. Between two epochs, or in one that only the driver ends: an engine takes part in the epochs that end
        after it was there."""
        answer_all(
            self.session.run.path,
            lambda asked: self.join(asked.devices) if asked.leaving is None else self.leave(asked.leaving),
        )
        self._scaler.scale(step, lambda: self._rollout.ranks, self.join, self.leave)

    def _num_prompts(self) -> int:
        """That wait or are being answered."""
        stats = self.session.flows.tasks.stats()
        return int(stats["depth"] + stats["leased"])

    def join(self, devices: str) -> str:
        """More engines, with the weights that the others hold; in the middle of an epoch they take part in it."""
        place = self.session.berth(devices)
        ranks = self._rollout.add(placement=place, timeout_s=self._loop.step_timeout_s)
        try:
            self.catch_up(ranks)
        except RillError:
            self._rollout.remove(*ranks)
            raise
        if self.is_open:
            self._engines.begin(*ranks)
        self.session.reseat()
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
        self.session.reseat()
        log.warning("%s left: %s; others go on with what it held", self._engines.name(rank), reason)

    # --- weights ------------------------------------------------------------------------------------------

    def publish(self, version: PolicyVersion, posted: Handle | None = None) -> dict[str, float]:
        """Bring every engine to the actor's weights as they are. One that did not come there is started again.
        `posted`: the call for it, where it was made before."""
        synced: Synced = self.session.ask(posted or self._actor.publish(version))
        for rank in self._rollout.ranks if synced.failed else ():
            if reason := synced.failed.get(name := self._engines.name(rank)):
                log.warning("engine %s is out of service: %s", name, reason)
                self._bring_back(self._engines, rank, reason)
        relaunches = sum(crew.num_relaunches.total() for crew in self._crews)
        return {**synced.metrics, "sync/relaunches": float(relaunches)}

    def catch_up(self, ranks: Sequence[int]) -> None:
        """Bring these engines to what the actor published last."""
        for rank in ranks:
            self.session.ask(self._actor.on(0).catch_up(self._rollout, rank), 2 * self._sync_s)

    def manifest(self) -> SealedManifest:
        """The newest weights, as a group that is no engine can pull them by itself."""
        manifest: SealedManifest = self.session.ask(self._actor.on(0).manifest(), self._sync_s)
        return manifest

    def _bring_back(self, crew: Crew, rank: int, reason: str) -> None:
        """Start a lost rank again, and once more where it is lost before it has the weights that the others hold."""
        if not self._has_trainer:
            raise PeerDiedError(reason)
        name, reason = crew.name(rank), reason.splitlines()[0]
        if crew is self._engines and f"exit code {LEFT_CODE}" in reason and crew.group.size > 1:
            self._see_off(rank, "it was told to go (SIGTERM)")
            return
        crew.count_relaunch(rank, reason)
        try:
            with (
                trace.span("relaunch", lane="loop", worker=name),
                boundary(f"relaunch of {name}, which was lost: {reason}"),
            ):
                crew.group.relaunch(rank, timeout_s=self._loop.step_timeout_s)
                if crew is self._engines:
                    self.catch_up([rank])
        except RillError as error:
            if not soon(lambda: rank in crew.group.lost()):
                raise
            self._bring_back(crew, rank, str(error))
        else:
            crew.recall(rank)
