"""The environment worker of robots: simulators in stages, played against a policy elsewhere.

    tasks ──▶ episodes that wait ──▶ stage 0: reset ─▶ ask the policy ─▶ play a chunk ─▶ …   (a process of simulators)
                                     stage 1:   └──────── while this one is simulated, that one is decided for ───┘
                                          │
    samples, outcomes ◀── group whole ◀───┘   the lease of the task ends together with what came of it

One event loop: a coroutine that takes tasks while simulators are free, and one for each stage. A stage's process that
dies or hangs is killed and started again; its episodes are counted as failed, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rill.data.initial_states import start_of
from rill.envs.robots.bank import Begin, Played, uses_device
from rill.envs.robots.process import SimulatorLostError, SimulatorProcess
from rill.envs.robots.recording import Choice, Recording
from rill.errors import RunError
from rill.runtime.channel import Channel, Lease
from rill.runtime.worker import Worker
from rill.telemetry import trace
from rill.types import EmbodiedTrajectory
from rill.workers.records import TRAIN, Answers, Flows, Task
from rill.workers.robots.config import RobotSettings
from rill.workers.robots.outcome import FilmLog, finished
from rill.workers.robots.policy import Answer, RemotePolicy

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Group:
    """A task under way."""

    lease: Lease
    episodes: list[EmbodiedTrajectory] = field(default_factory=list)

    @property
    def task(self) -> Task:
        task: Task = self.lease.value
        return task


class Waiting(NamedTuple):
    """An episode that no simulator has begun yet."""

    group: Group
    number: int


Work = asyncio.Queue[Waiting | None]
"""What the stages of a worker have in common during one epoch of the tasks; None: no more will come."""


async def take(work: Work, num_free: int, *, wait: bool) -> list[Waiting]:
    """Up to so many; `wait`: at least one, or the end."""
    taken: list[Waiting] = []
    while len(taken) < num_free and (not work.empty() or (wait and not taken)):
        found = await work.get()
        if found is None:
            work.put_nowait(None)  # for the other stages
            break
        taken.append(found)
    return taken


class Stage:
    """Some simulators, and the episodes that they are in."""

    def __init__(self, settings: RobotSettings, size: int, name: str) -> None:
        timeout_s = settings.rollout.timeout_s
        self.simulators = SimulatorProcess(settings.simulator, size, timeout_s=timeout_s)
        self.size = size
        self.name = name
        self.live: dict[int, tuple[Group, Recording]] = {}
        self.simulating_s = 0.0
        self.waiting_s = 0.0

    @property
    def simulating(self) -> float:
        """Share of the time in which it was simulating, and not waiting for the policy."""
        return self.simulating_s / max(1e-9, self.simulating_s + self.waiting_s)


class RobotEnvWorker(Worker):
    def __init__(self, *, settings: RobotSettings, run_dir: str) -> None:
        self.settings = settings
        self._turn: Callable[[], AbstractContextManager[Any]] = nullcontext
        rollout = settings.rollout
        sizes = [len(range(n, rollout.num_envs, rollout.stages)) for n in range(rollout.stages)]
        name = f"{self.group_name}-{self.rank}"
        self.stages = [Stage(settings, size, f"{name}/{n}") for n, size in enumerate(sizes)]
        for stage in self.stages:
            stage.simulators.spec()  # they start side by side; one that cannot is told of now
        self.films = FilmLog(rollout, Path(run_dir), name)
        self._answers: Answers[Answer] | None = None

    def close(self) -> None:
        for stage in self.stages:
            stage.simulators.close()
        self.films.close()

    def run(self, flows: Flows, requests: Channel, answers: tuple[Channel, ...], epoch: int) -> int:
        """Until this epoch of the tasks ends and everything taken is finished; returns the number of groups."""
        if self._answers is None or self._answers.name != answers[self.rank].name:  # other ones after a move
            self._answers = Answers(answers[self.rank])
        if uses_device(self.settings.simulator):
            # The policy waits for these: it lends the device then.
            self._turn = partial(self.device_lock, requests)
        try:
            policy = RemotePolicy(requests, self._answers, self.rank)
            return asyncio.run(self._run(flows.tasks.of_epoch(epoch), flows, policy))
        except ExceptionGroup as errors:  # of the stages: the first is what went wrong
            raise (first := errors.exceptions[0]) from first.__cause__

    async def _run(self, tasks: Channel, flows: Flows, policy: RemotePolicy) -> int:
        work: Work = asyncio.Queue(self.settings.rollout.num_envs)
        async with asyncio.TaskGroup() as running:
            for stage in self.stages:
                running.create_task(self._play(stage, work, flows, policy))
            count = 0
            async for lease in tasks.leases():
                count += 1
                group = Group(lease)
                for number in range(group.task.num_samples):
                    # Waits while enough is waiting here: another worker's simulators may be free for the next task.
                    await work.put(Waiting(group, number))
            await work.put(None)
        return count

    async def _play(self, stage: Stage, work: Work, flows: Flows, policy: RemotePolicy) -> None:
        while True:
            begun = await take(work, stage.size - len(stage.live), wait=not stage.live)
            if not begun and not stage.live:
                return
            await self._begin(stage, begun)
            for played_as in sorted({self._how(group) for group, _ in stage.live.values()}):
                await self._chunk(stage, policy, played_as)
            for slot in [slot for slot, (_, recording) in stage.live.items() if recording.is_over]:
                group, recording = stage.live.pop(slot)
                group.episodes.append(recording.trajectory())
                self.films.add(group.task, recording, group.episodes[-1])
                if len(group.episodes) == group.task.num_samples:
                    done = finished(self.settings.algorithm, group.task, group.episodes, stage.simulating)
                    await flows.finish(group.lease, *done)

    async def _begin(self, stage: Stage, begun: list[Waiting]) -> None:
        free = [slot for slot in range(stage.size) if slot not in stage.live]
        placed = dict(zip(free, begun, strict=False))
        begins = {
            slot: Begin(start_of(waiting.group.task.prompt), self.films.size_of(waiting.group.task))
            for slot, waiting in placed.items()
        }
        firsts = await self._simulate(stage, stage.simulators.reset, begins)
        for slot, (group, number) in placed.items():
            name, start = f"{group.task.id}/{number}", begins[slot].start
            stage.live[slot] = (group, Recording(name, group.task.id, start, firsts[slot]))

    def _how(self, group: Group) -> tuple[bool, bool]:
        """Whether it is played for training, and whether without a draw."""
        purpose = group.task.purpose
        return purpose == TRAIN, purpose in self.settings.greedy

    async def _chunk(self, stage: Stage, policy: RemotePolicy, played_as: tuple[bool, bool]) -> None:
        """One decision of the policy on the episodes that are played so, and what the simulators make of it."""
        slots = [
            slot
            for slot, (group, recording) in sorted(stage.live.items())
            if self._how(group) == played_as and not recording.is_over
        ]
        if not slots:
            return
        recordings = [stage.live[slot][1] for slot in slots]
        seeds = [seed_of(self.settings.seed, recording) for recording in recordings]
        asked_s = time.perf_counter()
        future = policy.ask([recording.observation for recording in recordings], seeds, greedy=played_as[1])
        with trace.span("wait for the policy", lane=stage.name, simulators=len(slots)):
            answer: Answer = await asyncio.wrap_future(future)
        stage.waiting_s += time.perf_counter() - asked_s
        decision = answer.decision
        chunks = {slot: decision.actions_BJA[row] for row, slot in enumerate(slots)}
        played = await self._simulate(stage, stage.simulators.play, chunks)
        for row, (slot, recording) in enumerate(zip(slots, recordings, strict=True)):
            if recording.is_over:  # lost with its simulator
                continue
            recording.add(Choice(decision, row, answer.version), played[slot])

    async def _simulate(
        self, stage: Stage, call: Callable[[Mapping[int, Any]], dict[int, Played]], asked: Mapping[int, Any]
    ) -> dict[int, Played]:
        """In a thread, so that the other stages go on; in turn with others, where simulators compute on the device.
        Where their process is lost, what was asked has failed, and so has all that was under way there."""

        def simulated() -> dict[int, Played]:
            with self._turn():
                began_s = time.perf_counter()
                with trace.span("simulate", lane=stage.name, simulators=len(asked)):
                    played = call(asked)
                stage.simulating_s += time.perf_counter() - began_s
                return played

        if not asked:
            return {}
        try:
            return await asyncio.to_thread(simulated)
        except SimulatorLostError as lost:
            self._bring_back(stage, str(lost))
            return dict.fromkeys(asked, Played.failed(str(lost)))

    def _bring_back(self, stage: Stage, reason: str) -> None:
        """What was under way in it is lost; it goes on with a new process."""
        for _, recording in stage.live.values():
            if not recording.is_over:
                recording.lose(reason)
        limit = self.settings.rollout.max_restarts
        if sum(other.simulators.num_restarts for other in self.stages) >= limit:
            raise RunError(f"{stage.name}: {reason} after {limit} restarts (rollout.max_restarts)")
        log.warning("%s: %s; started again", stage.name, reason)
        stage.simulators.restart()


def seed_of(seed: int, recording: Recording) -> int:
    """Decides what is drawn for the next chunk of an episode, wherever it is played."""
    words = f"{seed}/{recording.name}/{recording.num_chunks}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
