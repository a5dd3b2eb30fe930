"""LIBERO's suites of household tasks, with cameras.

    [simulator]
    type = "libero"                             pip install "rill[libero]"; its assets come from the hub
    suite = "libero_spatial"

A task is named by its number in the suite; the state id picks one of the initial states that LIBERO ships with it, so
that results can be compared with others'. State and pictures are what OpenVLA-OFT, π0 and lerobot were trained on:
position, axis times angle, gripper; pictures turned by half a turn. Needs OpenGL off screen (EGL or OSMesa).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.envs.robots.base import Simulator, SimulatorConfig, Step, check_task
from rill.envs.robots.gym import resized
from rill.registry import import_extra
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec

CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
SETTLE_STEPS = 10
"""The scene falls into place before the policy sees it."""
STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


class LiberoSimulator(Simulator):
    class Config(SimulatorConfig):
        type: Literal["libero"] = "libero"
        suite: str = "libero_spatial"
        max_steps: int = Field(default=300, ge=1)
        """Actions of an episode."""
        image_size: int = Field(default=128, ge=16)
        """Pixels of a camera's side."""

    def __init__(self, config: Config) -> None:
        needs = 'LIBERO is not installed: pip install "rill[libero]"'
        libero = import_extra("libero.libero", needs)
        self._config = config
        self._open = import_extra("libero.libero.envs", needs).OffScreenRenderEnv
        self._folder = Path(libero.get_libero_path("bddl_files"))
        self._suite: Any = libero.benchmark.get_benchmark_dict()[config.suite]()
        self._env: Any = None
        self._task = -1
        self._last: Any = None
        self.spec = RobotSpec(
            state_size=8,
            action_size=7,
            cameras=tuple(CAMERAS),
            image_size=config.image_size,
            tasks=tuple(str(n) for n in range(self._suite.n_tasks)),
        )

    def reset(self, start: InitialState) -> Observation:
        check_task(start, self.spec)
        self._choose(int(start.task))
        states = self._suite.get_task_init_states(self._task)
        self._env.reset()
        self._last = self._env.set_init_state(states[start.state_id % len(states)])
        for _ in range(SETTLE_STEPS):
            self._last, _, _, _ = self._env.step(STILL)
        return self._seen()

    def step(self, action_A: Floats) -> Step:
        self._last, _, done, _ = self._env.step(np.clip(action_A, -1.0, 1.0))
        return Step(self._seen(), float(done), bool(done), bool(done))

    def render(self, size: int) -> Pixels:
        return resized(self._last[CAMERAS["agentview"]][::-1], size)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _choose(self, task: int) -> None:
        """One scene is open at a time: each holds an OpenGL context."""
        if task == self._task and self._env is not None:
            return
        self.close()
        self._task = task
        chosen, size = self._suite.get_task(task), self._config.image_size
        self._env = self._open(
            bddl_file_name=str(self._folder / chosen.problem_folder / chosen.bddl_file),
            camera_heights=size,
            camera_widths=size,
        )
        self._env.seed(0)

    def _seen(self) -> Observation:
        last = self._last
        *axis, cosine = last["robot0_eef_quat"]
        sine = np.sqrt(max(0.0, 1.0 - cosine**2))
        turn = np.array(axis) * (2.0 * np.arccos(np.clip(cosine, -1.0, 1.0)) / sine if sine > 1e-6 else 0.0)
        state = np.concatenate([last["robot0_eef_pos"], turn, last["robot0_gripper_qpos"]])
        return Observation(
            state=state.astype(np.float32),
            images={name: np.ascontiguousarray(last[key][::-1, ::-1]) for name, key in CAMERAS.items()},
            instruction=str(self._suite.get_task(self._task).language),
        )
