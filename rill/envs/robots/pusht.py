"""Push-T: a round finger pushes a T onto its place on the table.

    [simulator]
    type = "pusht"                              pip install "rill[pusht]"

The state is the finger, the T and its angle; the reward is the share of the place that is covered, and the episode
succeeds at 95 %. The state id seeds where everything lies.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.envs.robots.base import Simulator, SimulatorConfig, Step, scaled, seed_of
from rill.envs.robots.gym import resized
from rill.registry import import_extra
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec

CAMERA = "top"
SIZE = 512.0
"""Of the table, in its own unit."""


class PushTSimulator(Simulator):
    class Config(SimulatorConfig):
        type: Literal["pusht"] = "pusht"
        max_steps: int = Field(default=300, ge=1)
        """Actions of an episode."""

    def __init__(self, config: Config) -> None:
        library = import_extra(
            "gym_pusht.envs.pusht", 'gym-pusht is not installed: pip install "rill[pusht]"'
        )
        self._env: Any = library.PushTEnv(obs_type="state", render_mode="rgb_array")
        self._config = config
        self.spec = RobotSpec(
            state_size=6,
            action_size=2,
            cameras=(CAMERA,) if config.image_size else (),
            image_size=config.image_size,
        )

    def reset(self, start: InitialState) -> Observation:
        state, _ = self._env.reset(seed=seed_of(start))
        return self._seen(state)

    def step(self, action_A: Floats) -> Step:
        goal = scaled(action_A, np.zeros(2, np.float32), np.full(2, SIZE, np.float32))
        state, reward, terminated, _, info = self._env.step(goal)
        return Step(self._seen(state), float(reward), bool(terminated), bool(info["is_success"]))

    def render(self, size: int) -> Pixels:
        return resized(self._env.render(), size)

    def close(self) -> None:
        self._env.close()

    def _seen(self, state: Any) -> Observation:
        places, angle = np.asarray(state[:4]) / SIZE * 2.0 - 1.0, float(state[4])
        size = self._config.image_size
        return Observation(
            state=np.array([*places, np.cos(angle), np.sin(angle)], np.float32),
            images={CAMERA: self.render(size)} if size else {},
            instruction="push the T onto its place",
        )
