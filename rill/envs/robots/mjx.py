"""The arm, thousands of times on one device: MuJoCo's physics in JAX (MJX), all scenes stepped together.

    [simulator]
    type = "arm_mjx"                            pip install "rill[mjx]"
    [rollout]
    num_envs = 4096

Scenes, rewards and instructions are those of rill.envs.robots.arm, which also makes the initial states, the expert and
the pictures, on the host. A scene is 21 numbers and lies on the host between two chunks, so a turn on a shared device
has nothing to move. An action is computed for every row; rows whose episode is over, or that were not asked for, keep
what they had. Physics is in single precision: episodes agree with the arm's up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rill.envs.robots.arm import CAMERA, COLOURS, SUBSTEPS, TURN, XML, ArmSimulator, instruction
from rill.envs.robots.bank import Begin, Played, Scenes
from rill.envs.robots.base import SimulatorConfig
from rill.envs.robots.scene import Scene, mjx
from rill.types import Bits, Floats, Observation, Pixels

NAMES = tuple(COLOURS)
LINE_SEARCH = 10
"""Steps of the solver's line search. MJX computes all of them, needed or not; with MuJoCo's 50 an episode is the same
and takes 3.5 times as long on a CPU."""


class Pose(NamedTuple):
    """All scenes, [N, …] each."""

    joints: Any
    speeds: Any
    targets: Any
    warm: Any
    """Accelerations of the last step, which the solver begins with."""
    blocks: Any

    @staticmethod
    def nowhere(size: int) -> Pose:
        joints, speeds, targets, warm = np.zeros((4, size, 3), np.float32)
        return Pose(joints, speeds, targets, warm, np.zeros((size, len(NAMES), 3), np.float32))


class Happened(NamedTuple):
    """[J, N, …] each: what came of the actions of a chunk."""

    states: Any
    is_executed: Any
    touched: Any
    """By block."""


class ArmMjxSimulator(Scenes):
    class Config(SimulatorConfig):
        type: Literal["arm_mjx"] = "arm_mjx"
        max_steps: int = Field(default=16, ge=1)
        """Actions of an episode; it then ends as truncated."""

    uses_device = True

    def __init__(self, config: Config, size: int) -> None:
        self._mjx, self._jax = mjx()
        self._arm = ArmSimulator(
            ArmSimulator.Config(max_steps=config.max_steps, image_size=config.image_size)
        )
        self.spec = self._arm.spec
        self._max_steps, self._image_size = config.max_steps, config.image_size
        self._pose = Pose.nowhere(size)
        self._tasks = np.zeros(size, np.int32)
        self._num_steps = np.zeros(size, np.int32)
        self._is_playing = np.zeros(size, np.bool_)
        self._picture_sizes = [0] * size

    def reset(self, begins: Mapping[int, Begin]) -> dict[int, Played]:
        played = {}
        for slot, begin in begins.items():
            seen = self._arm.reset(begin.start)
            for numbers, first in zip(self._pose, _first(seen.state), strict=True):
                numbers[slot] = first
            self._tasks[slot], self._num_steps[slot] = NAMES.index(begin.start.task), 0
            self._is_playing[slot], self._picture_sizes[slot] = True, begin.picture_size
            played[slot] = Played(seen, pictures=self._pictures(slot, seen.state[None]))
        return played

    def play(self, chunks: Mapping[int, Floats]) -> dict[int, Played]:
        """One chunk [J, A] each, all of one length."""
        slots = list(chunks)
        assert self._is_playing[slots].all(), "a simulator has no episode: reset it first"
        length = len(chunks[slots[0]])
        actions_JNA = np.zeros((length, len(self._tasks), self.spec.action_size), np.float32)
        actions_JNA[:, slots] = np.stack(list(chunks.values()), axis=1)
        moving_N = np.zeros(len(self._tasks), np.bool_)
        moving_N[slots] = True
        pose, happened = self._jax.device_get(self._chunk(self._pose, actions_JNA, moving_N, self._num_steps))
        self._pose = Pose(*map(np.array, pose))  # what JAX gives is read-only
        self._num_steps += happened.is_executed.sum(0)
        return {slot: self._played(slot, happened) for slot in slots}

    def show(self, slots: Mapping[int, int]) -> dict[int, Played]:
        lengths = set(slots.values())
        assert lengths == {1}, f"the expert is shown an action at a time, not {sorted(lengths)}"
        shown = {}
        for slot in slots:
            pose = self._pose
            self._arm.place(
                NAMES[self._tasks[slot]], pose.joints[slot], pose.targets[slot], pose.blocks[slot]
            )
            shown[slot] = self._arm.expert()[None]
        return {slot: each._replace(expert_JA=shown[slot]) for slot, each in self.play(shown).items()}

    # --- inside -------------------------------------------------------------------------------------------

    @cached_property
    def _chunk(self) -> Any:
        """(pose, actions [J, N, A], who moves [N], actions before [N]) to (pose, Happened): compiled at the first."""
        jax, physics, jnp = self._jax, self._mjx, self._jax.numpy
        scene = Scene(XML)
        scene.model.opt.ls_iterations = LINE_SEARCH
        model = physics.put_model(scene.model)
        empty, limit = physics.put_data(scene.model, scene.data), self._max_steps
        low_A, high_A = scene.model.jnt_range.T
        blocks = [scene.geom(name) for name in NAMES]

        def one(pose: Pose, action_A: Any) -> tuple[Pose, Any, Any]:
            targets = jnp.clip(pose.targets + TURN * jnp.clip(action_A, -1.0, 1.0), low_A, high_A)
            data = empty.replace(
                qpos=pose.joints,
                qvel=pose.speeds,
                ctrl=targets,
                qacc_warmstart=pose.warm,
                mocap_pos=pose.blocks,
            )
            data, _ = jax.lax.scan(lambda d, _: (physics.step(model, d), None), data, None, length=SUBSTEPS)
            is_near = data.contact.dist < 0
            touched = [jnp.any(is_near & (data.contact.geom == block).any(-1)) for block in blocks]
            after = Pose(data.qpos, data.qvel, targets, data.qacc_warmstart, pose.blocks)
            seen = [data.qpos, 0.2 * data.qvel, data.site_xpos[0], pose.blocks.ravel()]
            return after, jnp.concatenate(seen), jnp.stack(touched)

        def act(now: tuple[Any, Any, Any], actions_NA: Any) -> tuple[Any, Happened]:
            pose, moving_N, count_N = now
            after, states, touched = jax.vmap(one)(pose, actions_NA)
            kept = jax.tree.map(
                lambda new, old: jnp.where(moving_N.reshape(-1, *[1] * (old.ndim - 1)), new, old), after, pose
            )
            count_N = count_N + moving_N
            goes_on_N = moving_N & ~touched.any(-1) & (count_N < limit)
            return (kept, goes_on_N, count_N), Happened(states, moving_N, touched)

        def chunk(pose: Pose, actions_JNA: Any, moving_N: Any, count_N: Any) -> tuple[Pose, Happened]:
            with jax.default_matmul_precision("highest"):  # of products in TF32 contacts would be off
                (pose, *_), happened = jax.lax.scan(act, (pose, moving_N, count_N), actions_JNA)
            return pose, happened

        return jax.jit(chunk)

    def _played(self, slot: int, happened: Happened) -> Played:
        executed_J: Bits = happened.is_executed[:, slot]
        last = int(executed_J.sum()) - 1
        states_JS: Floats = happened.states[: last + 1, slot]
        touched = happened.touched[last, slot]
        success, terminated = bool(touched[self._tasks[slot]]), bool(touched.any())
        truncated = not terminated and bool(self._num_steps[slot] >= self._max_steps)
        rewards_J = np.zeros(len(executed_J), np.float32)
        rewards_J[last] = float(success)
        is_finite = bool(np.isfinite(states_JS).all())
        self._is_playing[slot] = is_finite and not (terminated or truncated)
        if not is_finite:
            return Played(None, rewards_J, executed_J, error="the simulator's state is not finite")
        return Played(
            self._observation(slot, states_JS[-1]),
            rewards_J,
            executed_J,
            terminated=terminated,
            truncated=truncated,
            success=success,
            pictures=self._pictures(slot, states_JS),
        )

    def _observation(self, slot: int, state: Floats) -> Observation:
        size, task = self._image_size, NAMES[self._tasks[slot]]
        images = {CAMERA: self._picture(slot, state, size)} if size else {}
        return Observation(state=state, images=images, instruction=instruction(task))

    def _pictures(self, slot: int, states_JS: Floats) -> tuple[Pixels, ...]:
        size = self._picture_sizes[slot]
        return tuple(self._picture(slot, state, size) for state in states_JS) if size else ()

    def _picture(self, slot: int, state: Floats, size: int) -> Pixels:
        first = _first(state)
        self._arm.place(NAMES[self._tasks[slot]], first.joints, first.joints, first.blocks)
        return self._arm.render(size)


def _first(state: Floats) -> Pose:
    """One scene at rest, from what is seen of it."""
    still = np.zeros(3, np.float32)
    return Pose(state[:3], still, state[:3], still, state[9:].reshape(-1, 3))
