"""One question, one answer, one reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rill.config import OneOf, PartConfig
from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.rewards.base import REWARDS
from rill.types import Prompt


class SingleTurn(Environment):
    class Config(Environment.Config):
        type: Literal["single_turn"] = "single_turn"
        reward: Annotated[PartConfig, OneOf(REWARDS)] = Field(
            default={"type": "exact"}, validate_default=True
        )
        """How an answer is scored."""

    async def run(self, task: Prompt, agents: Agents) -> None:
        await agents.policy.generate(task)
