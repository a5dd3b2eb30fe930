"""Rill's own scene: an arm of three joints, two blocks, and an instruction that says which one to touch.

    [rollout.simulator]
    type = "arm"

Reward 1 for the named block; touching the other ends the episode with 0. The state has the joints, the finger and both
blocks, always red before blue: only the instruction says which of them is meant. The state id decides where the blocks
lie and how the arm stands.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rill.envs.robots.base import Simulator, SimulatorConfig, Step, check_task, seed_of
from rill.envs.robots.scene import RayCamera, Scene
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec

COLOURS = {"red": "0.85 0.2 0.15 1", "blue": "0.15 0.35 0.85 1"}
CAMERA = "front"
TURN = 0.16
"""Radians that an action of 1 moves a joint's target."""
SUBSTEPS = 8
NEAR, FAR = 0.28, 0.52
"""Metres from the arm's foot to a block."""

XML = f"""
<mujoco model="touch">
  <compiler angle="radian"/>
  <option timestep="0.006" integrator="implicitfast" gravity="0 0 -9.81"/>
  <visual><headlight diffuse="0.8 0.8 0.8"/></visual>
  <default>
    <joint damping="1.2" armature="0.05"/>
    <position kp="45" forcerange="-40 40"/>
    <geom contype="0" conaffinity="0"/>
  </default>
  <worldbody>
    <camera name="{CAMERA}" pos="0.2 -1.05 0.75" xyaxes="1 0 0 0 0.514 0.857" fovy="46"/>
    <geom name="table" type="box" size="0.7 0.7 0.02" pos="0.1 0 -0.02" rgba="0.72 0.66 0.58 1"/>
    <geom name="foot" type="cylinder" size="0.06 0.04" pos="0 0 0.04" rgba="0.25 0.27 0.3 1"/>
    <body name="base" pos="0 0 0.08">
      <joint name="yaw" axis="0 0 1" range="-2.4 2.4" limited="true"/>
      <geom type="sphere" size="0.045" rgba="0.35 0.38 0.42 1" mass="0.5"/>
      <body name="upper" pos="0 0 0.02">
        <joint name="shoulder" axis="0 1 0" range="-0.4 1.9" limited="true"/>
        <geom type="capsule" fromto="0 0 0 0 0 0.3" size="0.026" rgba="0.93 0.6 0.2 1" mass="0.4"/>
        <body name="fore" pos="0 0 0.3">
          <joint name="elbow" axis="0 1 0" range="0.1 2.5" limited="true"/>
          <geom type="capsule" fromto="0 0 0 0 0 0.3" size="0.02" rgba="0.93 0.72 0.3 1" mass="0.25"/>
          <body name="hand" pos="0 0 0.32">
            <geom name="finger" type="sphere" size="0.03" rgba="0.15 0.15 0.18 1" mass="0.05" contype="1"
                  conaffinity="1"/>
            <site name="tip"/>
          </body>
        </body>
      </body>
    </body>
    {
    "".join(
        f'''<body name="{name}" mocap="true"><geom name="{name}" type="box" size="0.04 0.04 0.04" rgba="{rgba}"
        contype="1" conaffinity="1"/></body>'''
        for name, rgba in COLOURS.items()
    )
}
  </worldbody>
  <actuator>
    <position joint="yaw"/><position joint="shoulder"/><position joint="elbow"/>
  </actuator>
</mujoco>
"""


class ArmSimulator(Simulator):
    class Config(SimulatorConfig):
        type: Literal["arm"] = "arm"
        max_steps: int = Field(default=16, ge=1)
        """Actions of an episode; it then ends as truncated."""

    names: ClassVar[tuple[str, ...]] = tuple(COLOURS)

    def __init__(self, config: Config) -> None:
        self._scene = Scene(XML)
        self._camera = RayCamera(self._scene.model, CAMERA, config.image_size) if config.image_size else None
        self._finger = self._scene.geom("finger")
        self._blocks = {name: self._scene.geom(name) for name in COLOURS}
        self._range = self._scene.model.jnt_range[:3]
        self._pictures: dict[int, RayCamera] = {}
        self._task = self.names[0]
        self.spec = RobotSpec(
            state_size=15,
            action_size=3,
            cameras=(CAMERA,) if self._camera else (),
            image_size=config.image_size,
            tasks=self.names,
        )

    def reset(self, start: InitialState) -> Observation:
        check_task(start, self.spec)
        # The scene does not depend on which block is named: both tasks see the same ones.
        rng = np.random.default_rng(seed_of(start._replace(task="")))
        joints = np.array([rng.uniform(-0.3, 0.3), rng.uniform(0.0, 0.25), rng.uniform(1.0, 1.4)])
        self.place(start.task, joints, joints, np.array(_places(rng)))
        return self._observation()

    def place(self, task: str, joints_A: Any, targets_A: Any, blocks_B3: Any) -> None:
        """Any scene, at rest."""
        self._scene.reset()
        data = self._scene.data
        data.qpos[:3], data.ctrl[:3], data.mocap_pos[:] = joints_A, targets_A, blocks_B3
        self._scene.forward()
        self._task = task

    def step(self, action_A: Floats) -> Step:
        data = self._scene.data
        wanted = data.ctrl + TURN * np.clip(action_A, -1.0, 1.0)
        data.ctrl[:] = np.clip(wanted, self._range[:, 0], self._range[:, 1])
        self._scene.step(SUBSTEPS)
        touched = self._scene.touched_by(self._finger)
        success = self._blocks[self._task] in touched
        terminated = bool(touched & set(self._blocks.values()))
        return Step(self._observation(), float(success), terminated, success)

    def expert(self) -> Floats:
        """Turns towards the block, then lowers the finger to it: inverse kinematics of two links."""
        data = self._scene.data
        goal = data.mocap_pos[self.names.index(self._task)] + [0.0, 0.0, 0.02]
        yaw = np.arctan2(goal[1], goal[0])
        reach, height = float(np.hypot(goal[0], goal[1])), float(goal[2] - 0.1)
        off = abs(data.qpos[0] - yaw)
        height += min(0.2, 0.6 * off)  # stays above everything until it faces the block
        upper, fore = 0.3, 0.32
        distance = float(np.clip(np.hypot(reach, height), 0.05, upper + fore - 1e-3))
        bend = np.pi - np.arccos(np.clip((upper**2 + fore**2 - distance**2) / (2 * upper * fore), -1, 1))
        inner = np.arccos(np.clip((upper**2 + distance**2 - fore**2) / (2 * upper * distance), -1, 1))
        shoulder = np.arctan2(reach, height) - inner
        wanted = np.array([yaw, shoulder, bend])
        action_A: Floats = np.clip((wanted - data.ctrl) / TURN, -1.0, 1.0).astype(np.float32)
        return action_A

    def render(self, size: int) -> Pixels:
        if size not in self._pictures:
            self._pictures[size] = RayCamera(self._scene.model, CAMERA, size)
        return self._pictures[size].picture(self._scene.data)

    def _observation(self) -> Observation:
        data = self._scene.data
        state = np.concatenate(
            [data.qpos[:3], 0.2 * data.qvel[:3], data.site_xpos[0], data.mocap_pos.ravel()]
        ).astype(np.float32)
        images = {CAMERA: self._camera.picture(data)} if self._camera else {}
        return Observation(state=state, images=images, instruction=instruction(self._task))


def instruction(task: str) -> str:
    return f"touch the {task} block"


def _places(rng: np.random.Generator) -> list[list[float]]:
    """Of both blocks, apart by at least half a radian."""
    first = rng.uniform(-1.2, 1.2)
    second = first
    while abs(second - first) < 0.5:
        second = rng.uniform(-1.2, 1.2)
    reach = rng.uniform(NEAR, FAR, size=2)
    return [[r * np.cos(a), r * np.sin(a), 0.04] for r, a in zip(reach, (first, second), strict=True)]
