"""A simulator without physics: a point that must reach a place, and that can be told to misbehave."""

from __future__ import annotations

import os
import time
from typing import Literal

import numpy as np

from rill.envs.robots.bank import Bank
from rill.envs.robots.base import Simulator, SimulatorConfig, Step
from rill.errors import ConfigError
from rill.types import Floats, InitialState, Observation, RobotSpec

HANG, CRASH, RAISE, NOT_FINITE, NO_REWARD = 9001, 9002, 9003, 9004, 9005
"""State ids whose first action goes wrong."""


class PointSimulator(Simulator):
    """Moves by a tenth of the action; at the place of its sign (task "left" or "right") it succeeds."""

    class Config(SimulatorConfig):
        type: Literal["tests.envs.robots.fakes:PointSimulator"] = "tests.envs.robots.fakes:PointSimulator"
        max_steps: int = 12
        """Actions."""
        crash_every: int = 0
        """State ids that this divides end their process with their first action. 0: none."""
        step_s: float = 0.0
        """Seconds that an action takes."""

    def __init__(self, config: Config) -> None:
        if config.step_s < 0:
            raise ConfigError(f"an action takes {config.step_s:g} s")
        self._config = config
        self.spec = RobotSpec(
            state_size=2,
            action_size=1,
            cameras=("front",) if config.image_size else (),
            image_size=config.image_size,
            tasks=("left", "right"),
        )
        self._place = 0.0
        self._steps = 0
        self._start = InitialState("", "left", 0)

    def reset(self, start: InitialState) -> Observation:
        self._start, self._steps = start, 0
        self._place = float(np.random.default_rng(start.state_id).uniform(-0.1, 0.1))
        return self._seen()

    def step(self, action_A: Floats) -> Step:
        assert self._steps < self._config.max_steps, "a finished simulator was stepped"
        if self._start.state_id == HANG:
            time.sleep(60)
        every = self._config.crash_every
        if self._start.state_id == CRASH or (every and self._start.state_id % every == 0):
            os._exit(3)
        if self._start.state_id == RAISE:
            raise RuntimeError("a joint fell off")
        if self._config.step_s:
            time.sleep(self._config.step_s)
        self._steps += 1
        self._place += 0.1 * float(np.clip(action_A[0], -1, 1))
        goal = -0.4 if self._start.task == "left" else 0.4
        success = abs(self._place) >= 0.4 and self._place * goal > 0
        is_over = abs(self._place) >= 0.4
        if is_over:
            self._steps = self._config.max_steps
        reward = float("nan") if self._start.state_id == NO_REWARD else float(success)
        return Step(self._seen(), reward, is_over, success)

    def expert(self) -> Floats:
        return np.array([-1.0 if self._start.task == "left" else 1.0], np.float32)

    def render(self, size: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.full((size, size, 3), 127, np.uint8)

    def _seen(self) -> Observation:
        place = float("nan") if self._start.state_id == NOT_FINITE and self._steps else self._place
        state = np.array([place, self._steps / 12], np.float32)
        size = self._config.image_size
        images = {"front": np.full((size, size, 3), int(127 + 100 * self._place), np.uint8)} if size else {}
        return Observation(state=state, images=images, instruction=f"go {self._start.task}")


class PointScenes(Bank):
    """As if it computed on a device: takes turns there with the policy."""

    class Config(PointSimulator.Config):
        type: Literal["tests.envs.robots.fakes:PointScenes"] = "tests.envs.robots.fakes:PointScenes"  # type: ignore[assignment]

    uses_device = True

    def __init__(self, config: Config, size: int) -> None:
        super().__init__(PointSimulator.Config(max_steps=config.max_steps, step_s=config.step_s), size)
