"""Scores trajectories with deadlines: a reward that fails or hangs becomes data, never a crash.

Called by environments, on their event loop. Every term of a mix runs beside the others, where its `isolation` says:

    inline   on the loop, at once
    async    awaited under a deadline
    thread   a daemon thread; past the deadline it is abandoned
    process  a worker process; past the deadline it is killed

A failed term counts as `failure_value`; the trajectory carries which term failed and why in `error`, and
`stats()` counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from rill.config import Config, PartConfig
from rill.envs.rewards.base import REWARDS, Isolation, Reward, as_score
from rill.envs.rewards.mix import Term, flatten
from rill.envs.rewards.per_loop import PerLoop
from rill.envs.rewards.processes import RewardProcesses, RewardTimeoutError
from rill.envs.trajectory_builder import response_text
from rill.types import Prompt, Trajectory

logger = logging.getLogger(__name__)


class ScoringConfig(Config):
    """How rewards are run."""

    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of one term of one trajectory, waiting for a place not counted."""
    failure_value: float = 0.0
    """What a term that failed or hung is worth, before its weight."""
    num_processes: int = Field(default=2, ge=1)
    """Worker processes for rewards that need one. They start only then."""
    memory_bytes: int = Field(default=8 * 2**30, ge=0)
    """Address space that scores may take in a worker process, beyond its libraries. 0: no limit."""
    max_concurrent: int = Field(default=256, ge=1)
    """Scores of one thread or async term in flight on one event loop; further ones wait. A term may set its own."""
    log_failures: int = Field(default=20, ge=0)
    """Failures written to the log, per term; all are counted. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermStats:
    """What has become of the scores of one term so far."""

    num_scored: int = 0
    num_failed: int = 0
    num_timeouts: int = 0
    """Included in num_failed."""
    seconds: float = 0.0
    """Total time from start to score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    value: float
    error: str | None


class RewardRunner:
    """Owns the rewards of one environment, their processes and their counts.

    >>> runner = RewardRunner(ExactReward.Config())
    >>> trajectory = await runner.score(prompt, trajectory)
    """

    def __init__(self, reward: PartConfig, config: ScoringConfig | None = None) -> None:
        self.config = config or ScoringConfig()
        self.terms: list[Term] = flatten(reward)
        self.rewards: list[Reward] = [REWARDS.load(t.config.type)(t.config) for t in self.terms]
        self._stats = [TermStats() for _ in self.terms]
        self._lock = threading.Lock()
        self._processes: RewardProcesses | None = None
        self._threads: ThreadPoolExecutor | None = None
        limits = [term.config.max_concurrent or self.config.max_concurrent for term in self.terms]
        self._places = PerLoop(lambda: [asyncio.Semaphore(limit) for limit in limits])

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its reward, its parts and, if a term failed, its error."""
        text = response_text(trajectory)
        scored = await asyncio.gather(
            *(self._score_term(index, prompt, text, trajectory) for index in range(len(self.terms)))
        )
        reward = sum(term.weight * one.value for term, one in zip(self.terms, scored, strict=True))
        errors = [f"reward {t.label}: {s.error}" for t, s in zip(self.terms, scored, strict=True) if s.error]
        if trajectory.error is not None:
            errors.insert(0, trajectory.error)
        return replace(
            trajectory,
            reward=reward,
            reward_parts={term.label: one.value for term, one in zip(self.terms, scored, strict=True)},
            error="; ".join(errors) or None,
        )

    def score_all(self, pairs: Sequence[tuple[Prompt, Trajectory]]) -> list[Trajectory]:
        """The same for callers without an event loop."""

        async def gather() -> list[Trajectory]:
            return list(await asyncio.gather(*(self.score(prompt, t) for prompt, t in pairs)))

        return asyncio.run(gather())

    def stats(self) -> dict[str, TermStats]:
        with self._lock:
            return {term.label: stats for term, stats in zip(self.terms, self._stats, strict=True)}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    async def _score_term(self, index: int, prompt: Prompt, text: str, trajectory: Trajectory) -> _Scored:
        started = time.perf_counter()
        try:
            value = as_score(await self._run(index, (prompt, text, trajectory)))
            if not math.isfinite(value):
                raise ValueError(f"the score is {value}")
        except Exception as error:  # noqa: BLE001  boundary: rewards are user code; their failures are data
            timed_out = isinstance(error, TimeoutError | RewardTimeoutError)
            message = str(error) or f"no score within {self._timeout_s(index):g} s"
            if (
                not isinstance(error, TimeoutError)
                and type(error).__module__ != RewardTimeoutError.__module__
            ):
                message = f"{type(error).__name__}: {message}"
            self._count(index, started, failed=True, timed_out=timed_out)
            self._log_failure(index, prompt, message)
            return _Scored(value=self.config.failure_value, error=message)
        self._count(index, started)
        return _Scored(value=value, error=None)

    async def _run(self, index: int, arguments: tuple[Prompt, str, Trajectory]) -> float:
        reward, timeout_s = self.rewards[index], self._timeout_s(index)
        match reward.isolation:
            case Isolation.INLINE:
                value = reward.score(*arguments)
                assert not isinstance(value, Awaitable)
                return value
            case Isolation.ASYNC:
                async with self._places()[index]:
                    awaitable = reward.score(*arguments)
                    assert isinstance(awaitable, Awaitable)
                    return await asyncio.wait_for(awaitable, timeout_s)
            case Isolation.THREAD:
                async with self._places()[index]:
                    return await asyncio.wait_for(_in_daemon_thread(reward, arguments), timeout_s)
            case Isolation.PROCESS:
                threads, processes = self._process_places()
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(threads, processes.score, index, arguments, timeout_s)

    def _timeout_s(self, index: int) -> float:
        return self.terms[index].config.timeout_s or self.config.timeout_s

    def _process_places(self) -> tuple[ThreadPoolExecutor, RewardProcesses]:
        """One thread per process: a score that waits for a place waits in the executor's queue, without a deadline
        of its own, because every score before it has one."""
        with self._lock:
            if self._threads is None or self._processes is None:
                parts = [(term.config.type, term.config) for term in self.terms]
                used = [
                    part if reward.isolation is Isolation.PROCESS else _NEVER_RUN
                    for part, reward in zip(parts, self.rewards, strict=True)
                ]
                self._processes = RewardProcesses(
                    used, num_processes=self.config.num_processes, memory_bytes=self.config.memory_bytes
                )
                self._threads = ThreadPoolExecutor(
                    self.config.num_processes, thread_name_prefix="rill-reward"
                )
            return self._threads, self._processes

    def _count(self, index: int, started: float, *, failed: bool = False, timed_out: bool = False) -> None:
        with self._lock:
            old = self._stats[index]
            self._stats[index] = TermStats(
                num_scored=old.num_scored + 1,
                num_failed=old.num_failed + failed,
                num_timeouts=old.num_timeouts + timed_out,
                seconds=old.seconds + time.perf_counter() - started,
            )

    def _log_failure(self, index: int, prompt: Prompt, message: str) -> None:
        if self._stats[index].num_failed <= self.config.log_failures:
            logger.warning("reward %s failed for prompt %s: %s", self.terms[index].label, prompt.id, message)


_NEVER_RUN = ("rill.envs.rewards.runner:_unused", None)
"""Keeps indices equal in the worker processes without building rewards there that run elsewhere."""


def _unused(_config: None) -> None:
    return None


async def _in_daemon_thread(reward: Reward, arguments: tuple[Prompt, str, Trajectory]) -> float:
    """A thread per call: one that hangs takes no place in a pool and does not keep the interpreter from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def work() -> None:
        try:
            value, error = reward.score(*arguments), None
        except Exception as raised:  # noqa: BLE001  boundary: handed to the awaiting runner
            value, error = 0.0, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, daemon=True, name="rill-reward-call").start()
    return as_score(await answer)
