"""Faults planted in whole runs, each in a part that a user could have written."""

from __future__ import annotations

import asyncio
from typing import Literal

from rill.envs.agent import Agents
from rill.envs.single_turn import SingleTurn
from rill.types import Prompt, Trajectory

HANGS_FOR_S = 3600.0


class WrongLogprobs(SingleTurn):
    """An environment that hands on other log-probabilities than the engine's: those of another temperature, say."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:WrongLogprobs"]  # type: ignore[assignment]

    async def run(self, task: Prompt, agents: Agents) -> None:
        reply = await agents.policy.generate(task)
        reply.logprobs[:] *= 1.3


class Stuck(SingleTurn):
    """An environment that waits for something that never comes."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:Stuck"]  # type: ignore[assignment]

    async def run(self, task: Prompt, agents: Agents) -> None:
        await asyncio.sleep(HANGS_FOR_S)
        raise AssertionError("the run should have ended long ago")


async def hanging(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A judge that does not answer for most answers: those that begin before the letter n."""
    if text[:1].lower() < "n":
        await asyncio.sleep(HANGS_FOR_S)
    return float(len(text) % 2)
