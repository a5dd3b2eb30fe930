"""What a reward is: a number for one finished trajectory.

Called by RewardRunner only. A reward may raise or hang: the runner turns either into data. Where it runs is its
own choice (`isolation`), because only the reward knows whether it can block or be trusted.
"""

from __future__ import annotations

from collections.abc import Awaitable
from enum import StrEnum
from typing import Any, Protocol

from pydantic import Field

from rill.config import PartConfig
from rill.registry import Registry
from rill.types import Prompt, Trajectory

REWARDS = Registry(
    "reward",
    {
        "exact": "rill.envs.rewards.exact:ExactReward",
        "numeric": "rill.envs.rewards.numeric:NumericReward",
        "math": "rill.envs.rewards.math:MathReward",
        "format": "rill.envs.rewards.format:FormatReward",
        "regex": "rill.envs.rewards.format:RegexReward",
        "code": "rill.envs.rewards.code:CodeReward",
        "judge": "rill.envs.rewards.judge:JudgeReward",
        "reasoning_gym": "rill.envs.rewards.gym:ReasoningGymReward",
        "function": "rill.envs.rewards.function:FunctionReward",
        "mix": "rill.envs.rewards.mix:MixReward",
    },
)


class Isolation(StrEnum):
    """Where a reward runs."""

    INLINE = "inline"  # on the event loop: pure, microseconds, cannot block
    ASYNC = "async"  # a coroutine that waits for others (an endpoint, a subprocess)
    THREAD = "thread"  # may block; a hanging call is abandoned, its thread lives on
    PROCESS = "process"  # may hang with the interpreter lock held: a worker process that can be killed


class RewardConfig(PartConfig):
    """What every reward has."""

    name: str = ""
    """Its label in `reward_parts` and metrics. Empty: its type."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Time limit of one score. Unset: that of the environment's `scoring`."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Scores in flight at the same time; the wait of further ones does not count against their time limit. Unset: that
    of the environment's `scoring`."""

    @property
    def label(self) -> str:
        return self.name or self.type


class Reward(Protocol):
    """Constructed from its Config alone, so that a worker process can build it too."""

    @property
    def isolation(self) -> Isolation: ...

    def score(
        self, prompt: Prompt, response_text: str, trajectory: Trajectory
    ) -> float | Awaitable[float]: ...


class InlineReward:
    """What is pure and takes microseconds."""

    isolation = Isolation.INLINE

    def __init__(self, config: Any) -> None:
        self.config = config


def as_score(value: object) -> float:
    """What a reward returned, as a float. A text, None or anything else that is no number is a mistake to be told."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"the reward returned {value!r:.80}: it must return a number, on every path")
    return float(value)  # type: ignore[arg-type]  # it has __float__, as seen above
