"""A reward of the user's own: `function = "my_lab.rewards:score"`.

The function takes (prompt, response_text, trajectory) and returns a number; it may be a coroutine function. By
default it runs in a worker process, because only a process can be stopped when it hangs.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Literal

from pydantic import field_validator

from rill.envs.rewards.base import Isolation, RewardConfig
from rill.errors import UnknownNameError
from rill.registry import load_target
from rill.types import Prompt, Trajectory


class FunctionReward:
    class Config(RewardConfig):
        type: Literal["function"] = "function"
        function: str
        """Where the function is, as "module:name"."""
        run_in: Literal["process", "thread", "inline"] = "process"
        """inline only for functions that are quick and cannot block. Coroutine functions are always awaited."""

        @field_validator("function")
        @classmethod
        def _exists(cls, value: str) -> str:
            """Looked up here, so that a misspelt name is found before anything is started."""
            try:
                target = load_target(value)
            except UnknownNameError as error:
                raise ValueError(str(error)) from error
            if not callable(target):
                raise ValueError(f"{value} is not a function but {type(target).__name__}")
            try:
                inspect.signature(target).bind("prompt", "response_text", "trajectory")
            except TypeError as error:
                raise ValueError(
                    f"{value} cannot be called with (prompt, response_text, trajectory): {error}"
                ) from error
            return value

        @property
        def label(self) -> str:
            return self.name or self.function.rpartition(":")[2]

    def __init__(self, config: Config) -> None:
        self.config = config
        self._function = load_target(config.function)
        is_coroutine = inspect.iscoroutinefunction(self._function)
        self.isolation = Isolation.ASYNC if is_coroutine else Isolation(config.run_in)

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float | Awaitable[float]:
        value: float | Awaitable[float] = self._function(prompt, response_text, trajectory)
        return value
