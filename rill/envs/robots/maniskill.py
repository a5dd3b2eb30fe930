"""ManiSkill's tasks with physics on the CPU, by state.

    [simulator]
    type = "maniskill"                          pip install "rill[maniskill]" (x86-64 only)
    [data]
    tasks = ["PickCube-v1"]

The state id seeds the reset. The reward is 1 for success unless `reward` says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.envs.gymnasium import gymnasium_library
from rill.envs.robots.base import Simulator, SimulatorConfig, Step, scaled, seed_of
from rill.envs.robots.gym import resized
from rill.registry import import_extra
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec


class ManiSkillSimulator(Simulator):
    class Config(SimulatorConfig):
        type: Literal["maniskill"] = "maniskill"
        task: str = "PickCube-v1"
        """One task to a run: each has a state and a robot of its own shape."""
        control_mode: str = "pd_ee_delta_pose"
        max_steps: int = Field(default=80, ge=1)
        """Actions of an episode."""
        reward: Literal["sparse", "normalized_dense"] = "sparse"

    def __init__(self, config: Config) -> None:
        # Importing it registers its environments.
        import_extra("mani_skill.envs", 'ManiSkill is not installed: pip install "rill[maniskill]"')
        self._config = config
        self._env: Any = gymnasium_library().make(
            config.task,
            num_envs=1,
            obs_mode="state",
            reward_mode=config.reward,
            control_mode=config.control_mode,
            sim_backend="physx_cpu",
            render_mode="rgb_array",
            max_episode_steps=config.max_steps,
        )
        state, _ = self._env.reset(seed=0)
        space = self._env.action_space
        self._low_A, self._high_A = (np.asarray(end, np.float32).ravel() for end in (space.low, space.high))
        self.spec = RobotSpec(state_size=_row(state).size, action_size=self._low_A.size, tasks=(config.task,))

    def reset(self, start: InitialState) -> Observation:
        state, _ = self._env.reset(seed=seed_of(start))
        return self._seen(state)

    def step(self, action_A: Floats) -> Step:
        state, reward, _, truncated, info = self._env.step(scaled(action_A, self._low_A, self._high_A))
        success = bool(_row(info["success"])[0])
        return Step(self._seen(state), float(_row(reward)[0]), success, success, bool(_row(truncated)[0]))

    def render(self, size: int) -> Pixels:
        return resized(np.squeeze(_host(self._env.render())), size)

    def close(self) -> None:
        self._env.close()

    def _seen(self, state: Any) -> Observation:
        words = self._config.task.partition("-v")[0]
        return Observation(state=_row(state), instruction=words)


def _host(value: Any) -> Any:
    """ManiSkill answers with tensors, of one row here."""
    return value.cpu().numpy() if hasattr(value, "cpu") else np.asarray(value)


def _row(value: Any) -> Floats:
    row: Floats = np.asarray(_host(value), np.float32).ravel()
    return row
