"""What a simulator is: a scene that can be set to a named initial state and takes one action at a time.

    class Door(Simulator):
        def reset(self, start): ...      -> Observation
        def step(self, action_A): ...    -> Step

Actions are numbers in −1 … 1, whatever the robot's own units are: an adapter scales them. One simulator is one scene;
many of them are played side by side by rill.envs.robots.bank, in a process of their own (process.py). An adapter
imports its library when it is opened, and says what to install where it is absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from rill.config import PartConfig
from rill.errors import ConfigError
from rill.registry import Registry
from rill.types import Floats, InitialState, Observation, Pixels, RobotSpec

SIMULATORS = Registry(
    "simulator",
    {
        "arm": "rill.envs.robots.arm:ArmSimulator",
        "arm_mjx": "rill.envs.robots.mjx:ArmMjxSimulator",
        "gymnasium": "rill.envs.robots.gym:GymnasiumSimulator",
        "metaworld": "rill.envs.robots.metaworld:MetaWorldSimulator",
        "pusht": "rill.envs.robots.pusht:PushTSimulator",
        "libero": "rill.envs.robots.libero:LiberoSimulator",
        "maniskill": "rill.envs.robots.maniskill:ManiSkillSimulator",
    },
)


class SimulatorConfig(PartConfig):
    """What every simulator has."""

    max_steps: int = Field(default=100, ge=1)
    """Actions of an episode; it then ends as truncated."""
    image_size: int = Field(default=0, ge=0)
    """Pixels of a camera's side. 0: no images, the state alone."""


class Step(NamedTuple):
    """What came of one action."""

    observation: Observation
    reward: float
    terminated: bool
    success: bool
    truncated: bool = False
    """Cut off by the simulator itself; `max_steps` is counted for it."""


class Simulator(ABC):
    """One scene. Never stepped after its episode has ended, until it is reset."""

    Config: ClassVar[type[SimulatorConfig]]
    spec: RobotSpec

    @abstractmethod
    def reset(self, start: InitialState) -> Observation:
        """The scene of that name, always the same."""

    @abstractmethod
    def step(self, action_A: Floats) -> Step:
        """One action, in −1 … 1."""

    def expert(self) -> Floats | None:
        """What a scripted expert would do now; None where there is none."""
        return None

    def render(self, size: int) -> Pixels | None:
        """A picture for people; None where the simulator has none."""
        return None

    def close(self) -> None:
        """Give back what it holds."""


def open_simulator(config: PartConfig) -> Simulator:
    simulator: Simulator = SIMULATORS.load(config.type)(config)
    return simulator


def seed_of(start: InitialState) -> int:
    """A number that stands for the scene, for simulators that are seeded."""
    words = [*start.suite.encode(), *start.task.encode(), start.state_id]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def check_task(start: InitialState, spec: RobotSpec) -> None:
    if spec.tasks and start.task not in spec.tasks:
        raise ConfigError(
            f"simulator {start.suite!r} has no task {start.task!r}: it has {', '.join(spec.tasks)}"
        )


def scaled(action_A: Floats, low_A: Floats, high_A: Floats) -> Floats:
    """−1 … 1 to the robot's own range."""
    within_A = np.minimum(np.maximum(action_A, -1.0), 1.0)  # np.clip takes twice as long for a few numbers
    return (low_A + 0.5 * (within_A + 1.0) * (high_A - low_A)).astype(np.float32)
