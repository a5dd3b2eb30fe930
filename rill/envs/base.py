"""What an environment is: one coroutine that puts a task to its agents and rewards them.

    class Shop(Environment):
        async def run(self, task, agents):
            async def price(item: str) -> float:
                "The price of an item."
                return PRICES[item]
            reply = await agents.policy.act(task.messages, tools=[price])
            return float(str(task.answer) in reply.text)

One object serves all episodes of a worker, thousands at once on one event loop: what belongs to one episode lives in
`run`, or in the session that `session(task)` gives. Episodes are run by rill.envs.episode, which has the deadlines and
turns what goes wrong into data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field, field_validator

from rill.config import Config, OneOf, PartConfig
from rill.data.chat import PromptEncoder
from rill.envs.rewards.base import REWARDS
from rill.envs.rewards.runner import RewardRunner, ScoringConfig
from rill.registry import Registry
from rill.types import Picture, Prompt, SamplingParams, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.envs.agent import Agents
    from rill.inference.base import Completion
    from rill.models.pictures import PictureReader

ENVIRONMENTS = Registry(
    "environment",
    {
        "single_turn": "rill.envs.single_turn:SingleTurn",
        "function": "rill.envs.function:FunctionEnvironment",
        "vault": "rill.envs.vault:Vault",
        "nim": "rill.envs.nim:Nim",
        "mcp": "rill.envs.mcp:McpEnvironment",
        "gymnasium": "rill.envs.gymnasium:GymnasiumEnvironment",
        "textarena": "rill.envs.textarena:TextArenaEnvironment",
        "openenv": "rill.envs.openenv:OpenEnvEnvironment",
        "verifiers": "rill.envs.verifiers.environment:VerifiersEnvironment",
    },
)


class Policy(Protocol):
    """An inference engine, here or elsewhere, as one episode sees it."""

    async def generate(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        name: str,
        model: str | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Completion:
        """Continue this sequence, in which placeholders stand for `pictures`.

        `name` stands for agent and tokens: inside an episode, two requests have the same name only if they continue the
        same tokens and are to have the same answer. `model`: None is the policy that is trained; else an adapter or
        another model.
        """
        ...


class LimitsConfig(Config):
    """What one episode may take."""

    setup_timeout_s: float = Field(default=120.0, gt=0)
    """Until its session is there."""
    turn_timeout_s: float = Field(default=1800.0, gt=0)
    """One answer of the policy, waiting for the engine included."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """One call of a tool. The model is told of a call that took longer."""
    teardown_timeout_s: float = Field(default=30.0, gt=0)
    """Giving the session back, and ending an episode that is over its time."""
    episode_timeout_s: float = Field(default=3600.0, gt=0)
    """From set-up to the last word; scoring has deadlines of its own (`scoring`)."""
    max_turns: int = Field(default=0, ge=0)
    """Answers of all agents together; the episode then ends as cut off. 0: as many as the environment asks for."""
    max_tokens: int = Field(default=0, ge=0)
    """Longest conversation in tokens, prompt included; it then ends as cut off. 0: the engine's context."""
    max_result_chars: int = Field(default=16_384, ge=1)
    """What the model is shown of a tool's result."""


class AgentConfig(Config):
    """One of several agents."""

    model: str | None = None
    """An adapter, or another model that the engine serves: it is not trained. Unset: the policy that is."""
    is_trained: bool = True
    """Off: what it says is no sample."""
    temperature: float | None = Field(default=None, ge=0)
    """Unset: that of the run, the only one that is trained at."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Unset: that of the run."""


class Environment(ABC):
    """Derive from it and write `run`; a Config of your own adds settings."""

    class Config(PartConfig):
        type: str
        reward: Annotated[PartConfig, OneOf(REWARDS)] | None = None
        """Scores the policy's last answer, added to what the environment gives. Unset: the environment gives all."""
        scoring: ScoringConfig = ScoringConfig()
        """Deadlines of rewards and where they run."""
        limits: LimitsConfig = LimitsConfig()
        agents: dict[str, AgentConfig] = {}
        """By name, where an agent is not simply the policy."""
        template_arguments: dict[str, Any] = {}
        """Passed to the chat template, e.g. enable_thinking = false. Empty: none."""
        chat_template: str = ""
        """How conversations are written: Jinja, or a file of it (*.jinja). Empty: the tokenizer's own template."""

        @field_validator("chat_template")
        @classmethod
        def _is_read(cls, value: str) -> str:
            if not value.endswith(".jinja"):
                return value
            try:
                return Path(value).expanduser().read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"the chat template {value} cannot be read: {error}") from error

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.encoder = PromptEncoder(
            tokenizer, template_arguments=config.template_arguments, chat_template=config.chat_template
        )
        self.rewards = RewardRunner(config.reward, config.scoring) if config.reward is not None else None

    @property
    def offers_tools(self) -> bool:
        """Whether episodes without a tool call are counted where calls are read by the environment itself, and not by
        an agent's `say` or `act`, which know what they offered."""
        return False

    @asynccontextmanager
    async def session(self, task: Prompt) -> AsyncIterator[Any]:
        """What one episode owns (a sandbox, a game, a connection): `agents.session` in `run`."""
        yield None

    @abstractmethod
    async def run(self, task: Prompt, agents: Agents) -> float | None:
        """One episode. Returns the policy's reward, or None where it is given otherwise (agent.reward, `reward`)."""

    def close(self) -> None:
        """Give back processes and connections."""
        if self.rewards is not None:
            self.rewards.close()


def open_environment(
    config: PartConfig, tokenizer: PreTrainedTokenizerBase, pictures: PictureReader | None = None
) -> Environment:
    """`pictures`: of a model that reads them (rill.models.pictures.load_pictures)."""
    environment: Environment = ENVIRONMENTS.load(config.type)(config, tokenizer)
    environment.encoder.pictures = pictures
    return environment
