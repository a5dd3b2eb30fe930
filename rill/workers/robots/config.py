"""What the workers of an embodied run read of its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.config import Config, PartConfig
from rill.data.initial_states import InitialStates
from rill.data.lerobot import LeRobotData
from rill.types import RobotSpec
from rill.workers.config import SampledConfig


class RobotRolloutConfig(SampledConfig):
    """[rollout]: simulators and how they are played."""

    num_envs: int = Field(default=64, ge=1)
    """Simulators of one environment worker, over all its stages."""
    stages: int = Field(default=2, ge=1)
    """Parts that they are played in, each in a process of its own: while one is simulated, the policy decides for
    another. 1: simulation and policy take turns."""
    group_size: int = Field(default=1, ge=1)
    """Episodes from each initial state."""
    timeout_s: float = Field(default=60.0, gt=0)
    """A simulator process that has not played a chunk by then is killed, its episodes counted as failed."""
    max_restarts: int = Field(default=20, ge=0)
    """Of the simulator processes of one worker, over the whole run; then the run ends."""
    films: int = Field(default=2, ge=0)
    """Held-out episodes that are filmed at every evaluation. 0: off."""
    film_size: int = Field(default=160, ge=16)
    """Pixels of a film's side."""

    @model_validator(mode="after")
    def _stages_have_simulators(self) -> Self:
        if self.num_envs < self.stages:
            raise ValueError(f"{self.num_envs} simulators cannot be played in {self.stages} stages")
        return self


class ImitationConfig(Config):
    """[imitation]: supervised steps on an expert's episodes, before the first RL step. 0 steps: off."""

    steps: int = Field(default=0, ge=0)
    demos: int = Field(default=50, ge=1)
    """Episodes that the scripted expert plays, from training states, or that are read at most."""
    dataset: str = ""
    """A folder in LeRobot's format whose episodes are imitated. Empty: the simulator's scripted expert is."""
    cameras: dict[str, str] = {}
    """The data set's name of a simulator's camera, where it is not "observation.images.CAMERA"."""
    action_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """(lowest, highest) action in the data set's units, which become −1 … 1. Unset: they are so already."""
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    min_success: float = Field(default=0.5, ge=0, le=1)
    """A scripted expert that succeeds less often than this is not imitated: the run ends and says so."""

    def recorded(self, spec: RobotSpec) -> LeRobotData:
        """The data set, which fits the robot."""
        return LeRobotData(Path(self.dataset), spec, cameras=self.cameras, action_range=self.action_range)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotSettings:
    """Travels with the launch of simulators and trainer."""

    simulator: PartConfig
    data: InitialStates.Config
    rollout: RobotRolloutConfig
    algorithm: EmbodiedAlgorithmConfig
    trainer: PartConfig
    imitation: ImitationConfig
    greedy: frozenset[str]
    """The evaluation sets in which the policy does not draw."""
    seed: int
