"""Any gymnasium environment with numbers for a state: classic control, MuJoCo's robots, a user's own.

    [simulator]
    type = "gymnasium"
    id = "HalfCheetah-v5"

A Box of actions is scaled from −1 … 1; of a Discrete, −1 … 1 is cut into as many equal parts. The state id seeds the
reset. An episode succeeds where the environment says so (`info["success"]`, `info["is_success"]`), or where its return
reaches `success_return`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.envs.gymnasium import gymnasium_library
from rill.envs.robots.base import Simulator, SimulatorConfig, Step, scaled, seed_of
from rill.errors import ConfigError
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec


class GymnasiumSimulator(Simulator):
    class Config(SimulatorConfig):
        type: Literal["gymnasium"] = "gymnasium"
        id: str
        """Of a registered environment; "module:Name-v0" imports the module first."""
        arguments: dict[str, Any] = {}
        """Passed to gymnasium.make."""
        instruction: str = ""
        """What the policy is told."""
        success_return: float = Field(float("inf"), allow_inf_nan=True)
        """Where the environment does not say whether it succeeded: a return from here on does."""
        render: bool = False
        """Take pictures for films, where the environment can."""

    def __init__(self, config: Config) -> None:
        options = {"render_mode": "rgb_array"} if config.render else {}
        gymnasium = gymnasium_library()
        self._env: Any = gymnasium.make(
            config.id, max_episode_steps=config.max_steps, **options, **config.arguments
        )
        self._config = config
        space = self._env.observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise ConfigError(f"{config.id}: its observations are {space}, not a Box of numbers")
        actions = self._env.action_space
        self._num_choices = int(getattr(actions, "n", 0))
        if self._num_choices:
            size = 1
        elif isinstance(actions, gymnasium.spaces.Box) and np.isfinite([actions.low, actions.high]).all():
            size = int(np.prod(actions.shape))
        else:
            raise ConfigError(f"{config.id}: its actions are {actions}, neither bounded numbers nor choices")
        self._return = 0.0
        self.spec = RobotSpec(state_size=int(np.prod(space.shape)), action_size=size)

    def reset(self, start: InitialState) -> Observation:
        state, _ = self._env.reset(seed=seed_of(start))
        self._return = 0.0
        return self._seen(state)

    def step(self, action_A: Floats) -> Step:
        state, reward, terminated, truncated, info = self._env.step(self._action(action_A))
        self._return += float(reward)
        is_over = bool(terminated or truncated)
        success = is_over and said_success(info, self._return >= self._config.success_return)
        return Step(self._seen(state), float(reward), bool(terminated), success, bool(truncated))

    def render(self, size: int) -> Pixels | None:
        return resized(self._env.render(), size) if self._config.render else None

    def close(self) -> None:
        self._env.close()

    def _action(self, action_A: Floats) -> Any:
        if self._num_choices:
            place = (float(np.clip(action_A[0], -1.0, 1.0)) + 1.0) / 2.0
            return min(self._num_choices - 1, int(place * self._num_choices))
        space = self._env.action_space
        return scaled(action_A, space.low.ravel(), space.high.ravel()).reshape(space.shape)

    def _seen(self, state: Any) -> Observation:
        return Observation(state=np.asarray(state, np.float32).ravel(), instruction=self._config.instruction)


def said_success(info: Mapping[str, Any], otherwise: bool) -> bool:
    for name in ("success", "is_success"):
        if name in info:
            return bool(np.all(info[name]))
    return otherwise


def resized(picture: Any, size: int) -> Pixels:
    """To a square of that side, by the nearest pixel."""
    pixels = np.asarray(picture, np.uint8)
    rows = (np.arange(size) * pixels.shape[0] / size).astype(int)
    columns = (np.arange(size) * pixels.shape[1] / size).astype(int)
    chosen: Pixels = np.ascontiguousarray(pixels[rows][:, columns])
    return chosen
