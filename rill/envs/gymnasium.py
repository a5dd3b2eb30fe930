"""Gymnasium's text games, `reset` and `step`: the model reads the observation and names an action.

[rollout.env] type = "gymnasium" id = "FrozenLake-v1" actions = ["left", "down", "right", "up"]
"""

from __future__ import annotations

import random
import re
from typing import Any, Literal

from pydantic import Field, field_validator

from rill.config import Config
from rill.data.base import DatasetConfig, Share, Split, check_template, on_side
from rill.envs.games import SEED, GameEnvironment, Step
from rill.errors import ConfigError
from rill.registry import import_extra
from rill.types import Message, Prompt


class GameConfig(Config):
    """Which game, and how it is told."""

    id: str
    """Of a registered environment; "module:Name-v0" imports the module first."""
    arguments: dict[str, Any] = {}
    """Passed to gymnasium.make, e.g. is_slippery = false."""
    actions: tuple[str, ...] = ()
    """What the model calls the actions 0, 1, 2, … The last one that its answer names is taken. Empty: the last number
    in the answer."""
    observation: Literal["render", "value"] = "render"
    """What the model reads: the picture in characters (render_mode "ansi"), or the value as Python writes it."""
    template: str = "\n{observation}\n"
    """How an observation is shown."""
    invalid_reward: float = 0.0
    """For an answer that names no action; the game does not move then."""

    @field_validator("template")
    @classmethod
    def _shows_the_observation(cls, template: str) -> str:
        check_template("template", template, ("observation",), ("observation",))
        return template


class GymnasiumEnvironment(GameEnvironment):
    class Config(GameConfig, GameEnvironment.Config):
        type: Literal["gymnasium"] = "gymnasium"

    config: Config

    def game(self) -> GymGame:
        return GymGame(self.config)


class GymnasiumTasks:
    """The data set: one instruction and the seed of a game. A warm-up shows moves at random."""

    class Config(GameConfig, DatasetConfig):
        type: Literal["gymnasium"] = "gymnasium"
        instruction: str = "Play the game. Answer with an action."
        form: Literal["chat", "bare"] = "chat"
        """The instruction as a user message, or as plain text."""
        end: str = ""
        """What ends an answer in a warm-up, a stop string of the run's; it then shows games of up to `shown_moves`.
        Empty: it shows one move."""
        shown_moves: int = Field(default=8, ge=1)
        num_seeds: int = Field(default=10_000, ge=1)
        """Seeds 0 … num_seeds − 1, both sides together."""
        held_out: Share = 0.1
        """Share of the seeds kept away from training, by a hash. 0: none. Games of other seeds may still be alike."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        self._config = config
        self._game = GymGame(config)
        self._seeds = [n for n in range(config.num_seeds) if on_side(f"seed {n}", config.held_out, split)]

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, index: int) -> Prompt:
        config, seed = self._config, self._seeds[index]
        asked = (Message(role="user", content=config.instruction),) if config.form == "chat" else ()
        return Prompt(
            id=f"{config.id}/{seed}",
            messages=asked,
            text=None if asked else config.instruction,
            task=config.id,
            metadata={SEED: seed, "solution": self._random_game(seed)},
        )

    def _random_game(self, seed: int) -> str:
        config, rng = self._config, random.Random(seed)
        step, said = self._game.start(seed), ""
        for _ in range(config.shown_moves if config.end else 1):
            action = rng.randrange(self._game.num_actions)
            move = config.actions[action] if config.actions else str(action)
            said += f"{step.observation}{move}{config.end}"
            step = self._game.move(move)
            if step.is_over:
                break
        return said


def gymnasium_library() -> Any:
    """The one door to gymnasium; rill.envs.robots.gym comes through it too."""
    return import_extra("gymnasium", 'gymnasium is not installed: pip install "rill[envs]"')


class GymGame:
    """rill.envs.games.Game over one gymnasium environment."""

    def __init__(self, config: GameConfig) -> None:
        gymnasium = gymnasium_library()
        self._config = config
        options: dict[str, Any] = {"render_mode": "ansi"} if config.observation == "render" else {}
        self._env: Any = gymnasium.make(config.id, **options, **config.arguments)
        count = getattr(self._env.action_space, "n", None)
        if count is None:
            raise ConfigError(f"{config.id} has no numbered actions: this adapter plays text games")
        if config.actions and len(config.actions) != count:
            raise ConfigError(f"{config.id} has {count} actions, `actions` names {len(config.actions)}")
        self.num_actions = int(count)

    def start(self, seed: int) -> Step:
        observation, _ = self._env.reset(seed=seed)
        return Step(player="policy", observation=self._shown(observation), rewards={})

    def move(self, text: str) -> Step:
        action = find_action(text, self._config.actions, self.num_actions)
        if action is None:
            names = ", ".join(self._config.actions) or f"a number from 0 to {self.num_actions - 1}"
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
