"""Scores trajectories with deadlines: a reward that fails or hangs becomes data, never a crash.

Called by run_episode, on its event loop. Every term of a mix runs beside the others, where its `isolation` says:

    inline   on the loop, at once
    async    awaited under a deadline
    thread   a daemon thread; past the deadline it is abandoned
    process  a worker process; past the deadline it is killed

A term that fails makes the whole score unknown: it says which term failed, why, and where in the user's code. Process
rewards run on as many processes as there are cores; a score that takes long gives its place up after PATIENCE_S, so
that the time a few of them hang does not add up for the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rill.config import Config, PartConfig
from rill.envs.child import ChildDiedError, ChildRaisedError
from rill.envs.deadline import Late, begun, is_own, within
from rill.envs.per_loop import PerLoop
from rill.envs.places import described
from rill.envs.rewards.base import REWARDS, Isolation, Reward, as_score
from rill.envs.rewards.mix import Term, flatten
from rill.envs.rewards.processes import RewardProcesses
from rill.envs.threads import in_thread
from rill.types import Prompt, Trajectory

logger = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""A score in a process that has run for so long lets another one start beside it."""


class ScoringConfig(Config):
    """How rewards are run."""

    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of one term of one trajectory, waiting for a place not counted."""
    num_processes: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=1)
    """Worker processes for rewards that need one, and as many again as are waiting for slow scores. They start only
    when needed."""
    memory_bytes: int = Field(default=8 * 2**30, ge=0)
    """Address space that scores may take in a worker process, beyond its libraries. 0: no limit."""
    max_concurrent: int = Field(default=256, ge=1)
    """Scores of one thread or async term in flight on one event loop; further ones wait. A term may set its own."""
    log_failures: int = Field(default=20, ge=0)
    """Failures written to the log, per term. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an answer is worth."""

    value: float
    parts: Mapping[str, float]
    """By term, unweighted; those that failed are left out."""
    error: str | None = None
    """What failed; the value means nothing then."""


class RewardRunner:
    """Owns the rewards of one environment, and their processes.

    >>> runner = RewardRunner(ExactReward.Config())
    >>> score = await runner.score(prompt, trajectory)
    """

    def __init__(self, reward: PartConfig, config: ScoringConfig | None = None) -> None:
        self.config = config or ScoringConfig()
        self.terms: list[Term] = flatten(reward)
        self.rewards: list[Reward] = [REWARDS.load(t.config.type)(t.config) for t in self.terms]
        self._num_failed = [0] * len(self.terms)
        parts = {
            index: (term.config.type, term.config)
            for index, term in enumerate(self.terms)
            if self.rewards[index].isolation is Isolation.PROCESS
        }
        self._processes = RewardProcesses(parts, memory_bytes=self.config.memory_bytes)
        limits = [term.config.max_concurrent or self.config.max_concurrent for term in self.terms]
        self._places = PerLoop(lambda: [asyncio.Semaphore(limit) for limit in limits])
        self._cores = PerLoop(lambda: asyncio.Semaphore(self.config.num_processes))

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """The weighted sum of the terms, all of them beside one another."""
        text = response_text(trajectory)
        if len(self.terms) == 1:
            scored = [await self._score_term(0, prompt, text, trajectory)]
        else:
            scored = await asyncio.gather(
                *(self._score_term(index, prompt, text, trajectory) for index in range(len(self.terms)))
            )
        pairs = list(zip(self.terms, scored, strict=True))
        errors = [f"reward {term.label}: {value}" for term, value in pairs if isinstance(value, str)]
        values = [(term, value) for term, value in pairs if not isinstance(value, str)]
        return Score(
            value=sum(term.weight * value for term, value in values),
            parts={term.label: value for term, value in values},
            error="; ".join(errors) or None,
        )

    def close(self) -> None:
        self._processes.close()
        for reward in self.rewards:
            if close := getattr(reward, "close", None):
                close()

    async def _score_term(self, index: int, prompt: Prompt, text: str, trajectory: Trajectory) -> float | str:
        """The value, or what went wrong."""
        try:
            value = as_score(await self._run(index, (prompt, text, trajectory)))
            if not math.isfinite(value):
                raise ValueError(f"the score is {value}")
        except BaseException as error:
            if not is_own(error):
                raise
            match error:
                case Late():
                    message = f"no score within {self._timeout_s(index):g} s"
                case ChildRaisedError():
                    message = str(error)  # described in the process that raised it
                case ChildDiedError():
                    message = f"its process {error}"
                case _:
                    message = described(error)
            self._log_failure(index, prompt, message)
            return message
        return value

    async def _run(self, index: int, arguments: tuple[Prompt, str, Trajectory]) -> object:
        reward, timeout_s = self.rewards[index], self._timeout_s(index)
        score: Any = reward.score
        if reward.isolation is Isolation.INLINE:
            return score(*arguments)
        async with self._places()[index]:
            match reward.isolation:
                case Isolation.ASYNC:
                    return await within(timeout_s, begun(score, *arguments))
                case Isolation.THREAD:
                    return await within(timeout_s, begun(in_thread, score, *arguments))
                case _:
                    return await self._run_in_process(index, arguments, timeout_s)

    async def _run_in_process(self, index: int, arguments: Any, timeout_s: float) -> object:
        """On a core of its own, until it turns out to be slow."""
        cores = self._cores()
        await cores.acquire()
        score = asyncio.ensure_future(in_thread(self._processes.score, index, arguments, timeout_s))
        try:
            await asyncio.wait({score}, timeout=PATIENCE_S)
        finally:
            cores.release()
        try:
            return await score
        except TimeoutError as error:
            raise Late from error

    def _timeout_s(self, index: int) -> float:
        return self.terms[index].config.timeout_s or self.config.timeout_s

    def _log_failure(self, index: int, prompt: Prompt, message: str) -> None:
        self._num_failed[index] += 1
        if self._num_failed[index] <= self.config.log_failures:
            logger.warning("reward %s failed for prompt %s: %s", self.terms[index].label, prompt.id, message)


def response_text(trajectory: Trajectory) -> str:
    """What the model said last: the text of the final assistant turn."""
    for turn in reversed(trajectory.turns):
        if turn.role == "assistant":
            return turn.text
    return ""
