"""The contract that every adapter keeps, on the libraries that are there; LIBERO and ManiSkill over stand-ins that have
the same calls, because their assets and wheels cannot be had everywhere."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rill.envs.robots import Simulator, open_simulator
from rill.envs.robots.bank import open_scenes
from rill.envs.robots.base import SIMULATORS
from rill.errors import MissingExtraError
from rill.types import InitialState


def opened(kind: str, **config: Any) -> Simulator:
    return open_simulator(SIMULATORS.load(kind).Config(type=kind, **config))


def keeps_the_contract(simulator: Simulator, task: str, max_steps: int) -> None:
    spec = simulator.spec
    start = InitialState("suite", task, 5)
    first, again = simulator.reset(start), simulator.reset(start)
    assert first.state.dtype == np.float32 and first.state.shape == (spec.state_size,)
    assert np.array_equal(first.state, again.state), "the same name is the same scene"
    other = simulator.reset(start._replace(state_id=6))
    assert not np.array_equal(first.state, other.state), "another name is another scene"
    for camera in spec.cameras:
        assert first.images[camera].shape == (spec.image_size, spec.image_size, 3)
        assert first.images[camera].dtype == np.uint8
    simulator.reset(start)
    num_steps = 0
    while num_steps < max_steps:
        num_steps += 1
        step = simulator.step(np.full(spec.action_size, 0.1, np.float32))
        assert np.isfinite(step.observation.state).all() and isinstance(step.success, bool)
        if step.terminated or step.truncated:
            break
    assert num_steps == max_steps or step.terminated or step.truncated
    simulator.close()


@pytest.mark.parametrize(
    ("kind", "config", "task"),
    [
        ("arm", {"image_size": 16}, "red"),
        ("gymnasium", {"id": "CartPole-v1", "success_return": 5.0}, ""),
        ("gymnasium", {"id": "Pendulum-v1"}, ""),
        ("gymnasium", {"id": "HalfCheetah-v5"}, ""),
        ("pusht", {}, ""),
        ("metaworld", {}, "drawer-open-v3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_adapter_keeps_the_contract(kind: str, config: dict[str, Any], task: str) -> None:
    needed = {"arm": "mujoco", "gymnasium": "gymnasium", "pusht": "gym_pusht", "metaworld": "metaworld"}[kind]
    pytest.importorskip(needed)
    keeps_the_contract(opened(kind, max_steps=6, **config), task, 6)


def test_metaworlds_own_expert_opens_the_drawer() -> None:
    pytest.importorskip("metaworld")
    simulator = opened("metaworld")
    simulator.reset(InitialState("metaworld", "drawer-open-v3", 1))
    for _ in range(150):
        step = simulator.step(simulator.expert())  # type: ignore[arg-type]
        if step.terminated or step.truncated:
            break
    assert step.success and step.reward == 1.0


class StandInScene:
    """What the two libraries' environments have in common: a number that actions add to."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.place, self.steps = 0.0, 0
        self.action_space = SimpleNamespace(low=np.full(7, -2.0), high=np.full(7, 2.0))

    def seed(self, seed: int) -> None: ...

    def close(self) -> None: ...


class LiberoScene(StandInScene):
    def reset(self) -> Any:
        self.place = 0.0

    def set_init_state(self, state: float) -> Any:
        self.place = state
        return self.seen()

    def step(self, action: Any) -> Any:
        assert np.abs(action).max() <= 1.0
        self.place += float(action[0])
        return self.seen(), 0.0, self.place > 1.0, {}

    def seen(self) -> dict[str, Any]:
        size = self.options["camera_heights"]
        pixels = np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)
        return {
            "robot0_eef_pos": np.array([self.place, 0, 0]),
            "robot0_eef_quat": np.array([0, 0, np.sin(0.25), np.cos(0.25)]),
            "robot0_gripper_qpos": np.zeros(2),
            "agentview_image": pixels,
            "robot0_eye_in_hand_image": pixels,
        }


class LiberoSuite:
    n_tasks = 3

    def get_task(self, number: int) -> Any:
        return SimpleNamespace(
            problem_folder="kitchen", bddl_file=f"{number}.bddl", language="pick up the bowl"
        )

    def get_task_init_states(self, number: int) -> list[float]:
        return [0.1 * n for n in range(10)]


class ManiSkillScene(StandInScene):
    def reset(self, seed: int) -> Any:
        self.place, self.steps = np.random.default_rng(seed).uniform(), 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.place, self.steps = self.place + float(action[0]), self.steps + 1
        cut = np.array([self.steps >= self.options["max_episode_steps"]])
        return self.seen(), np.array([0.0]), np.array([False]), cut, {"success": np.array([self.place > 50])}

    def seen(self) -> Any:
        return np.array([[self.place, 1.0, 2.0]])


def test_libero_is_called_as_it_wants_and_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, envs = ModuleType("libero.libero"), ModuleType("libero.libero.envs")
    inner.benchmark = SimpleNamespace(get_benchmark_dict=lambda: {"libero_spatial": LiberoSuite})  # type: ignore[attr-defined]
    inner.get_libero_path = lambda name: f"/assets/{name}"  # type: ignore[attr-defined]
    envs.OffScreenRenderEnv = LiberoScene  # type: ignore[attr-defined]
    for name, module in (
        ("libero", ModuleType("libero")),
        ("libero.libero", inner),
        ("libero.libero.envs", envs),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    simulator = opened("libero", image_size=16, max_steps=6)
    assert simulator.spec.tasks == ("0", "1", "2")
    seen = simulator.reset(InitialState("libero", "2", 0))
    assert seen.instruction == "pick up the bowl"
    assert np.allclose(seen.state[3:6], [0, 0, 0.5]), "axis times angle"
    assert seen.images["wrist"][-1, -1].tolist() == [0, 1, 2], "half a turn"
    keeps_the_contract(simulator, "2", 6)


def test_maniskill_is_called_as_it_wants_and_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium

    for name in ("mani_skill", "mani_skill.envs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["mani_skill"].envs = sys.modules["mani_skill.envs"]  # type: ignore[attr-defined]
    monkeypatch.setattr(gymnasium, "make", lambda name, **options: ManiSkillScene(**options))
    keeps_the_contract(opened("maniskill", max_steps=6), "PickCube-v1", 6)


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("maniskill", "mani_skill", "maniskill"), ("arm_mjx", "jax", "mjx")]
)
def test_a_library_that_is_not_there_is_named_with_its_install_line(
    kind: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf'pip install "rill\[{extra}\]"'):
        open_scenes(SIMULATORS.load(kind).Config(type=kind), 1)
