"""A reward of the user's own: `function = "my_lab.rewards:score"`.

The function takes (prompt, response_text, trajectory) and returns a number; it may be a coroutine function. By
default it runs in a worker process, because only a process can be stopped when it hangs.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Literal

from rill.envs.rewards.base import Isolation, RewardConfig
from rill.errors import ConfigError
from rill.registry import load_target
from rill.types import Prompt, Trajectory


class FunctionReward:
    class Config(RewardConfig):
        type: Literal["function"] = "function"
        function: str
        """Where the function is, as "module:name"."""
        run_in: Literal["process", "thread", "inline"] = "process"
        """inline only for functions that are quick and cannot block. Coroutine functions are always awaited."""

        @property
        def label(self) -> str:
            return self.name or self.function.rpartition(":")[2]

    def __init__(self, config: Config) -> None:
        self.config = config
        self._function = load_target(config.function)
        if not callable(self._function):
            raise ConfigError(f"{config.function} is not a function but {type(self._function).__name__}")
        is_coroutine = inspect.iscoroutinefunction(self._function)
        self.isolation = Isolation.ASYNC if is_coroutine else Isolation(config.run_in)

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float | Awaitable[float]:
        value: float | Awaitable[float] = self._function(prompt, response_text, trajectory)
        return value
