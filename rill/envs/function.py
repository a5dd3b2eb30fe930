"""An environment that is one function of the user's: `function = "my_lab.envs:play"`, called with (task, agents)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.errors import UnknownNameError
from rill.registry import load_target
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
            """Looked up here, so that a misspelt name is found before anything is started."""
            try:
                target = load_target(value)
            except UnknownNameError as error:
                raise ValueError(str(error)) from error
            if not inspect.iscoroutinefunction(target):
                raise ValueError(f"{value} is not an `async def` function")
            try:
                inspect.signature(target).bind("task", "agents")
            except TypeError as error:
                raise ValueError(f"{value} cannot be called with (task, agents): {error}") from error
            return value

    config: Config

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._function = load_target(config.function)

    async def run(self, task: Prompt, agents: Agents) -> float | None:
        value: float | None = await self._function(task, agents)
        return value
