"""What an environment is: it puts one prompt to a policy and gives back one finished trajectory.

Callers: rollout workers and evaluation. An environment is a coroutine per episode on the caller's event loop, so
thousands of episodes run beside one another. It talks in token ids: what the engine sampled is kept as it came, and
nothing is decoded and encoded again between turns.

A failing episode is data: a trajectory with `error` set, which keeps what was sampled where the environment makes it
itself. What an environment raises becomes one too (guarded.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rill.config import PartConfig
from rill.envs.guarded import GuardedEnvironment
from rill.registry import Registry
from rill.types import Prompt, SamplingParams, TokenIds, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.inference.base import Completion

ENVIRONMENTS = Registry(
    "environment",
    {
        "single_turn": "rill.envs.single_turn:SingleTurn",
        "calculator": "rill.envs.calculator:Calculator",
    },
)


class Policy(Protocol):
    """An inference engine as one episode sees it."""

    async def generate(self, token_ids: TokenIds, sampling: SamplingParams) -> Completion:
        """Continue this sequence."""
        ...


class Environment(Protocol):
    """Constructed from its Config and the model's tokenizer; see open_environment."""

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """Run one episode to its end, reward included."""
        ...

    def close(self) -> None:
        """Give back processes and connections."""
        ...


def open_environment(config: PartConfig, tokenizer: PreTrainedTokenizerBase) -> Environment:
    """The environment, with its exceptions turned into trajectories that say so (guarded.py)."""
    environment: Environment = ENVIRONMENTS.load(config.type)(config, tokenizer)
    return GuardedEnvironment(environment, tokenizer)
