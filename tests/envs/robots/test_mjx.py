"""The arm on a device against the arm of one scene. Compiling takes most of a minute on a busy CPU: slow."""

from __future__ import annotations

import numpy as np
import pytest

from rill.envs.robots.arm import ArmSimulator
from rill.envs.robots.bank import Bank, Begin
from rill.envs.robots.mjx import ArmMjxSimulator
from rill.envs.robots.recording import demonstrate
from rill.types import InitialState

pytest.importorskip("jax")
pytest.importorskip("mujoco.mjx")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE, CHUNK = 32, 4
BEGINS = {n: Begin(InitialState("arm", ("red", "blue")[n % 2], n)) for n in range(SIZE)}


@pytest.fixture(scope="module")
def scenes() -> ArmMjxSimulator:
    return ArmMjxSimulator(ArmMjxSimulator.Config(), SIZE)


def test_episodes_are_those_of_the_arm_up_to_rounding(scenes: ArmMjxSimulator) -> None:
    arms = Bank(ArmSimulator.Config(), SIZE)
    firsts, wanted = scenes.reset(BEGINS), arms.reset(BEGINS)
    assert all(np.array_equal(firsts[n].observation.state, wanted[n].observation.state) for n in BEGINS)  # type: ignore[union-attr]
    rng, live, ends = np.random.default_rng(0), set(BEGINS), set()
    while live:
        # Towards the block, shaken: some touch the right one, some the other, some neither.
        experts = {n: arms._simulators[n].expert() for n in live}
        shaken = {n: expert + rng.normal(0, 0.4, (CHUNK, 3)) for n, expert in experts.items()}
        chunks = {n: np.clip(actions, -1, 1).astype(np.float32) for n, actions in shaken.items()}
        theirs, ours = arms.play(chunks), scenes.play(chunks)
        for n in sorted(live):
            assert np.array_equal(ours[n].executed_J, theirs[n].executed_J)
            assert np.array_equal(ours[n].rewards_J, theirs[n].rewards_J)
            assert ours[n][3:6] == theirs[n][3:6], "terminated, truncated, success"
            assert ours[n].observation.instruction == theirs[n].observation.instruction  # type: ignore[union-attr]
            np.testing.assert_allclose(
                ours[n].observation.state,  # type: ignore[union-attr]
                theirs[n].observation.state,  # type: ignore[union-attr]
                atol=5e-3,
            )
        ends |= {ours[n][3:6] for n in live if ours[n].is_over}
        live = {n for n in live if not ours[n].is_over}
    assert {(True, False, True), (False, True, False)} <= ends, "some touched the block, some ran out of time"


def test_scenes_that_were_not_asked_for_or_are_over_do_not_move(scenes: ArmMjxSimulator) -> None:
    scenes.reset(BEGINS)
    chunk = np.full((CHUNK, 3), 0.5, np.float32)
    before = [part.copy() for part in scenes._pose]
    scenes.play({3: chunk})
    others = [n for n in range(SIZE) if n != 3]
    for was, now in zip(before, scenes._pose, strict=True):
        assert np.array_equal(was[others], now[others])
    assert not np.array_equal(before[0][3], scenes._pose.joints[3])
    while not scenes.play({3: 0 * chunk})[3].is_over:
        pass
    with pytest.raises(AssertionError, match="reset it first"):
        scenes.play({3: chunk})


def test_a_state_that_is_not_finite_costs_its_own_episode(scenes: ArmMjxSimulator) -> None:
    scenes.reset(BEGINS)
    scenes._pose.speeds[5] = np.nan
    played = scenes.play(dict.fromkeys(range(8), np.zeros((CHUNK, 3), np.float32)))
    assert [n for n, each in played.items() if each.error] == [5]
    assert scenes.reset({5: BEGINS[5]})[5].observation is not None
    assert scenes.play({5: np.zeros((CHUNK, 3), np.float32)})[5].error is None


def test_the_expert_and_the_pictures_are_the_arms(scenes: ArmMjxSimulator) -> None:
    starts = [begin.start for begin in BEGINS.values()]
    assert demonstrate(scenes, SIZE, starts, CHUNK).num_episodes == SIZE
    arm = ArmSimulator(ArmSimulator.Config())
    arm.reset(starts[0])
    (picture,) = scenes.reset({0: Begin(starts[0], picture_size=32)})[0].pictures
    assert np.abs(picture.astype(int) - arm.render(32)).mean() < 1.0  # seen from numbers of single precision
