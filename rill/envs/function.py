"""An environment that is one function of the user's: `function = "my_lab.envs:play"`, called with (task, agents)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.registry import load_function, load_target
from rill.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FunctionEnvironment(Environment):
    class Config(Environment.Config):
        type: Literal["function"] = "function"
        function: str
        """Where the function is, as "module:name". It is a coroutine function and returns the policy's reward, or None
        where the reward is given otherwise."""

        @field_validator("function")
        @classmethod
        def _exists(cls, value: str) -> str:
            if not inspect.iscoroutinefunction(load_function(value, "task", "agents")):
                raise ValueError(f"{value} is not an `async def` function")
            return value

    config: Config

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._function = load_target(config.function)

    async def run(self, task: Prompt, agents: Agents) -> float | None:
        value: float | None = await self._function(task, agents)
        return value
