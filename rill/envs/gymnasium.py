"""Gymnasium's text games, `reset` and `step`: the model reads the observation and names an action.

[rollout.env]
type = "gymnasium"
id = "FrozenLake-v1"
actions = ["left", "down", "right", "up"]
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

from pydantic import Field, field_validator

from rill.data.base import check_template
from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.games import Step, play
from rill.errors import ConfigError, MissingExtraError
from rill.types import Prompt


class GymnasiumEnvironment(Environment):
    class Config(Environment.Config):
        type: Literal["gymnasium"] = "gymnasium"
        id: str
        """Of a registered environment; "module:Name-v0" imports the module first."""
        arguments: dict[str, Any] = {}
        """Passed to gymnasium.make, e.g. is_slippery = false."""
        actions: tuple[str, ...] = ()
        """What the model calls the actions 0, 1, 2, … The last one that its answer names is taken. Empty: the last
        number in the answer."""
        observation: Literal["render", "value"] = "render"
        """What the model reads: the picture in characters (render_mode "ansi"), or the value as Python writes it."""
        template: str = "\n{observation}\n"
        """How an observation is shown."""
        max_turns: int = Field(default=32, ge=1)
        """Moves of one episode; it then ends as cut off."""
        invalid_reward: float = 0.0
        """For an answer that names no action; the game does not move then."""

        @field_validator("template")
        @classmethod
        def _shows_the_observation(cls, template: str) -> str:
            check_template("template", template, ("observation",), ("observation",))
            return template

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> None:
        # The episodes of a group begin with the same state: what differs is what the policy does.
        seed = int.from_bytes(hashlib.blake2b(agents.group_id.encode(), digest_size=4).digest(), "little")
        await play(GymGame(self.config), task, agents, seed=seed, max_turns=self.config.max_turns)


def gymnasium_library() -> Any:
    """The one door to gymnasium; rill.envs.robots.gym comes through it too."""
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError('gymnasium is not installed: pip install "rill[envs]"') from error
    return gymnasium


class GymGame:
    """rill.envs.games.Game over one gymnasium environment."""

    def __init__(self, config: GymnasiumEnvironment.Config) -> None:
        gymnasium = gymnasium_library()
        self._config = config
        options: dict[str, Any] = {"render_mode": "ansi"} if config.observation == "render" else {}
        self._env: Any = gymnasium.make(config.id, **options, **config.arguments)
        count = getattr(self._env.action_space, "n", None)
        if count is None:
            raise ConfigError(f"{config.id} has no numbered actions: this adapter plays text games")
        if config.actions and len(config.actions) != count:
            raise ConfigError(f"{config.id} has {count} actions, `actions` names {len(config.actions)}")
        self._num_actions = int(count)

    def start(self, seed: int) -> Step:
        observation, _ = self._env.reset(seed=seed)
        return Step(player="policy", observation=self._shown(observation), rewards={})

    def move(self, text: str) -> Step:
        action = find_action(text, self._config.actions, self._num_actions)
        if action is None:
            names = ", ".join(self._config.actions) or f"a number from 0 to {self._num_actions - 1}"
            said = self._config.template.format(observation=f"That is no action. Answer with {names}.")
            return Step(player="policy", observation=said, rewards={"policy": self._config.invalid_reward})
        observation, reward, is_over, is_cut_off, _ = self._env.step(action)
        return Step(
            player="policy",
            observation=self._shown(observation),
            rewards={"policy": float(reward)},
            is_over=bool(is_over or is_cut_off),
            is_cut_off=bool(is_cut_off and not is_over),
        )

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Any) -> str:
        text = str(self._env.render() if self._config.observation == "render" else observation)
        marked = re.sub(r"\x1b\[\d+m(.)\x1b\[0m", r"[\1]", text)  # toy games colour the square one stands on
        return self._config.template.format(observation=re.sub(r"\x1b\[[0-9;]*m", "", marked))


def find_action(text: str, names: tuple[str, ...], count: int) -> int | None:
    """The last action that an answer names."""
    if not names:
        numbers = [int(n) for n in re.findall(r"\d{1,9}", text)]
        return numbers[-1] if numbers and numbers[-1] < count else None
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.findall(rf"(?i)(?<!\w)(?:{pattern})(?!\w)", text)
    return [name.lower() for name in names].index(found[-1].lower()) if found else None
