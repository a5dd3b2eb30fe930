from __future__ import annotations

import numpy as np
import pytest

from rill.envs.robots.arm import CAMERA, ArmSimulator
from rill.envs.robots.scene import RayCamera
from rill.types import InitialState

mujoco = pytest.importorskip("mujoco")


@pytest.fixture(scope="module")
def arm() -> ArmSimulator:
    return ArmSimulator(ArmSimulator.Config(image_size=32))


def play_expert(arm: ArmSimulator, start: InitialState) -> tuple[bool, int]:
    arm.reset(start)
    for count in range(1, 100):
        step = arm.step(arm.expert())
        if step.terminated or step.truncated:
            return step.success, count
    raise AssertionError("an episode that does not end")


def test_the_expert_touches_the_block_it_is_told_to(arm: ArmSimulator) -> None:
    ended = [play_expert(arm, InitialState("arm", task, n)) for n in range(8) for task in ("red", "blue")]
    assert all(success for success, _ in ended)


def test_touching_the_other_block_ends_the_episode_without_a_reward(arm: ArmSimulator) -> None:
    arm.reset(InitialState("arm", "red", 5))
    arm._task = "blue"  # the expert is told otherwise than the judge
    step = None
    for _ in range(16):
        action = arm.expert()
        arm._task = "red"
        step = arm.step(action)
        arm._task = "blue"
        if step.terminated:
            break
    assert step is not None and step.terminated and not step.success and step.reward == 0.0


def test_both_tasks_of_a_state_see_the_same_scene_and_another_instruction(arm: ArmSimulator) -> None:
    red, blue = (arm.reset(InitialState("arm", task, 3)) for task in ("red", "blue"))
    assert np.array_equal(red.state, blue.state)
    assert (red.instruction, blue.instruction) == ("touch the red block", "touch the blue block")


def test_pictures_by_rays_are_the_same_every_time_and_show_both_blocks(arm: ArmSimulator) -> None:
    first, again = (arm.reset(InitialState("arm", "red", 3)).images[CAMERA] for _ in range(2))
    assert np.array_equal(first, again) and first.shape == (32, 32, 3)
    pixels = arm.render(96).astype(int)
    is_red = (pixels[..., 0] > pixels[..., 1] + 60) & (pixels[..., 0] > pixels[..., 2] + 60)
    is_blue = (pixels[..., 2] > pixels[..., 0] + 60) & (pixels[..., 2] > pixels[..., 1] + 40)
    assert is_red.sum() > 5 and is_blue.sum() > 5


def test_a_ray_meets_what_mujoco_says_it_meets_whichever_way_the_camera_looks(arm: ArmSimulator) -> None:
    arm.reset(InitialState("arm", "red", 3))
    model, data = arm._scene.model, arm._scene.data
    camera = RayCamera(model, CAMERA, 24)
    around = np.linspace(-np.pi, np.pi, 9)
    for angle in around:  # the arm seen from all sides
        origin = np.array([0.2 + 1.2 * np.cos(angle), 1.2 * np.sin(angle), 0.8])
        spread = np.random.default_rng(0).uniform(-0.5, 0.5, (200, 3))
        rays = np.array([0.2, 0.0, 0.2]) + spread - origin
        rays /= np.linalg.norm(rays, axis=1, keepdims=True)
        hits, _ = camera.cast(data, origin, rays)
        found = np.zeros(1, np.int32)
        for ray, hit in zip(rays, hits, strict=True):
            mujoco.mj_ray(model, data, origin, ray, None, 1, -1, found)
            assert found[0] == hit
