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
from rill.registry import load_function, load_target
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
            load_function(value, "prompt", "response_text", "trajectory")
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
