"""Several scenes of one kind in this process, each at its own place in its own episode.

Called by process.py's child, and by tests. Simulators of one scene are played one after the other by a Bank; one that
steps many scenes at once is a `Scenes` itself (mjx.py). A chunk is played until its episode ends, by the simulator or
after `max_steps` actions: what follows in it is not executed, and a finished simulator is never stepped. A simulator
that raises, or whose observation or reward is not finite, ends its own episode with an error and is opened anew: others
go on.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from rill.config import PartConfig
from rill.envs.robots.base import SIMULATORS, Simulator, SimulatorConfig, open_simulator
from rill.errors import UserError, in_words
from rill.types import Bits, Floats, InitialState, Observation, Pixels, RobotSpec

Act = Callable[[Simulator, int], Floats]
"""The next action of an episode, by its place in the chunk."""


class Begin(NamedTuple):
    """An episode to begin."""

    start: InitialState
    picture_size: int = 0
    """Pixels of the pictures that are taken after every action, for people. 0: none."""


class Played(NamedTuple):
    """What came of a chunk, or of a reset (nothing executed)."""

    observation: Observation | None
    """What is seen after it; None after an error."""
    rewards_J: Floats = np.zeros(0, np.float32)
    executed_J: Bits = np.zeros(0, np.bool_)
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    pictures: tuple[Pixels, ...] = ()
    expert_JA: Floats | None = None
    """With `Bank.show`: what the expert did."""
    error: str | None = None

    @staticmethod
    def failed(error: str) -> Played:
        """Nothing was played."""
        return Played(None, error=error)

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated or self.error is not None


class Scenes(ABC):
    """What a process plays, by slot."""

    spec: RobotSpec
    uses_device: ClassVar[bool] = False
    """It computes on the device of the environment worker: it takes turns there with others, and compiles first."""

    @abstractmethod
    def reset(self, begins: Mapping[int, Begin]) -> dict[int, Played]: ...

    @abstractmethod
    def play(self, chunks: Mapping[int, Floats]) -> dict[int, Played]:
        """One chunk [J, A] each."""

    @abstractmethod
    def show(self, slots: Mapping[int, int]) -> dict[int, Played]:
        """Let the expert play so many actions."""

    def close(self) -> None:
        """Give back what it holds."""


def open_scenes(config: PartConfig, size: int) -> Scenes:
    kind = SIMULATORS.load(config.type)
    scenes: Scenes = kind(config, size) if issubclass(kind, Scenes) else Bank(config, size)
    return scenes


def uses_device(config: PartConfig) -> bool:
    return bool(getattr(SIMULATORS.load(config.type), "uses_device", False))


class Bank(Scenes):
    def __init__(self, config: PartConfig, size: int) -> None:
        assert isinstance(config, SimulatorConfig), f"{type(config)} is no SimulatorConfig"
        self._config = config
        self._simulators: list[Simulator] = [open_simulator(config) for _ in range(size)]
        self.spec = self._simulators[0].spec
        self._picture_sizes = [0] * size
        self._is_playing = [False] * size
        self._num_steps = [0] * size

    def reset(self, begins: Mapping[int, Begin]) -> dict[int, Played]:
        return {slot: self._reset(slot, begin) for slot, begin in begins.items()}

    def play(self, chunks: Mapping[int, Floats]) -> dict[int, Played]:
        return {slot: self._play(slot, actions_JA) for slot, actions_JA in chunks.items()}

    def show(self, slots: Mapping[int, int]) -> dict[int, Played]:
        return {slot: self._show(slot, length) for slot, length in slots.items()}

    def close(self) -> None:
        for simulator in self._simulators:
            simulator.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _reset(self, slot: int, begin: Begin) -> Played:
        self._picture_sizes[slot] = begin.picture_size
        try:
            observation = _finite(self._simulators[slot].reset(begin.start))
        except UserError:
            raise  # a task that there is not: nobody's episode would begin
        except Exception as error:  # noqa: BLE001  boundary: a simulator's error is its episode's
            return self._failed(slot, error)
        self._is_playing[slot], self._num_steps[slot] = True, 0
        return Played(observation, pictures=self._pictures(slot))

    def _play(self, slot: int, actions_JA: Floats) -> Played:
        return self._run(slot, len(actions_JA), lambda simulator, j: actions_JA[j])

    def _show(self, slot: int, length: int) -> Played:
        done: list[Floats] = []

        def act(simulator: Simulator, j: int) -> Floats:
            action_A = simulator.expert()
            if action_A is None:
                raise UserError(f"simulator {self._config.type!r} has no scripted expert")
            done.append(action_A)
            return action_A

        played = self._run(slot, length, act)
        experts_JA = np.zeros((length, self.spec.action_size), np.float32)
        experts_JA[: len(done)] = done
        return played._replace(expert_JA=experts_JA)

    def _run(self, slot: int, length: int, act: Act) -> Played:
        assert self._is_playing[slot], f"simulator {slot} has no episode: reset it first"
        simulator = self._simulators[slot]
        rewards_J, executed_J = np.zeros(length, np.float32), np.zeros(length, np.bool_)
        pictures: list[Pixels] = []
        try:
            for j in range(length):
                step = simulator.step(act(simulator, j))
                if not np.isfinite(step.reward):
                    raise ValueError(f"the simulator's reward is {step.reward}")
                rewards_J[j], executed_J[j] = step.reward, True
                observation = _finite(step.observation)
                pictures += self._pictures(slot)
                self._num_steps[slot] += 1
                truncated = step.truncated or self._num_steps[slot] >= self._config.max_steps
                if step.terminated or truncated:
                    break
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  boundary: a simulator's error is its episode's
            return self._failed(slot, error)._replace(rewards_J=rewards_J, executed_J=executed_J)
        self._is_playing[slot] = not (step.terminated or truncated)
        return Played(
            observation,
            rewards_J,
            executed_J,
            terminated=step.terminated,
            truncated=truncated and not step.terminated,
            success=step.success,
            pictures=tuple(pictures),
        )

    def _pictures(self, slot: int) -> tuple[Pixels, ...]:
        size = self._picture_sizes[slot]
        picture = self._simulators[slot].render(size) if size else None
        return () if picture is None else (picture,)

    def _failed(self, slot: int, error: Exception) -> Played:
        self._is_playing[slot] = False
        with contextlib.suppress(Exception):  # it is broken already
            self._simulators[slot].close()
        self._simulators[slot] = open_simulator(self._config)
        return Played.failed(in_words(error))


def _finite(observation: Observation) -> Observation:
    if not np.isfinite(observation.state).all():
        raise ValueError("the simulator's state is not finite")
    return observation
