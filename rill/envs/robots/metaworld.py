"""Meta-World's fifty tasks for a Sawyer arm, by state: sparse reward for success, or its own shaped one.

    [simulator]
    type = "metaworld"                          pip install "rill[metaworld]"
    [data]
    tasks = ["drawer-open-v3"]

The state id seeds where the objects and the goal are. Meta-World's scripted policies are the experts. One simulator
plays every task; a task's scene is compiled when it first comes up.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.envs.robots.base import Simulator, SimulatorConfig, Step, check_task, seed_of
from rill.envs.robots.scene import RayCamera
from rill.registry import import_extra
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec

CAMERA = "corner3"
STATE_SIZE, ACTION_SIZE = 39, 4


class MetaWorldSimulator(Simulator):
    class Config(SimulatorConfig):
        type: Literal["metaworld"] = "metaworld"
        max_steps: int = Field(default=150, ge=1, le=500)
        """Actions of an episode; Meta-World itself ends at 500."""
        reward: Literal["sparse", "dense"] = "sparse"
        """"sparse": 1 when the task is done, which ends the episode; "dense": Meta-World's own, 0 … 10."""

    def __init__(self, config: Config) -> None:
        needs = 'metaworld is not installed: pip install "rill[metaworld]"'
        tasks = import_extra("metaworld.env_dict", needs).ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        self._config = config
        self._classes: dict[str, Any] = {
            name.removesuffix("-goal-observable"): cls for name, cls in tasks.items()
        }
        self._experts: dict[str, Any] = import_extra("metaworld.policies", needs).ENV_POLICY_MAP
        self._envs: dict[str, Any] = {}
        self._cameras: dict[tuple[str, int], RayCamera] = {}
        self._task = ""
        self._state = np.zeros(STATE_SIZE)
        self.spec = RobotSpec(
            state_size=STATE_SIZE,
            action_size=ACTION_SIZE,
            cameras=(CAMERA,) if config.image_size else (),
            image_size=config.image_size,
            tasks=tuple(self._classes),
        )

    def reset(self, start: InitialState) -> Observation:
        check_task(start, self.spec)
        if start.task not in self._envs:
            self._envs[start.task] = self._classes[start.task](seed=0)
        self._task = start.task
        env = self._envs[start.task]
        env.seeded_rand_vec, env._freeze_rand_vec = True, False
        env.seed(seed_of(start))
        self._state, _ = env.reset()
        return self._seen()

    def step(self, action_A: Floats) -> Step:
        self._state, reward, _, _, info = self._envs[self._task].step(np.clip(action_A, -1.0, 1.0))
        success = bool(info["success"])
        is_sparse = self._config.reward == "sparse"
        return Step(self._seen(), float(success if is_sparse else reward), success, success)

    def expert(self) -> Floats:
        action_A: Floats = np.clip(self._experts[self._task]().get_action(self._state), -1.0, 1.0)
        return action_A.astype(np.float32)

    def render(self, size: int) -> Pixels:
        env = self._envs[self._task]
        if (self._task, size) not in self._cameras:
            self._cameras[self._task, size] = RayCamera(env.model, CAMERA, size)
        return self._cameras[self._task, size].picture(env.data)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()

    def _seen(self) -> Observation:
        size = self._config.image_size
        return Observation(
            state=np.asarray(self._state, np.float32),
            images={CAMERA: self.render(size)} if size else {},
            instruction=self._task.removesuffix("-v3").replace("-", " "),
        )
