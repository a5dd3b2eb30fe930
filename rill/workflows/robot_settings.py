"""What the workers of an embodied run are launched with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.config import PartConfig
from rill.models.robots.base import Policy, load_policy, open_policy
from rill.types import RobotSpec
from rill.workflows.robot_config import RobotRolloutConfig


class RobotSettings(NamedTuple):
    """An environment worker's."""

    simulator: PartConfig
    rollout: RobotRolloutConfig
    algorithm: EmbodiedAlgorithmConfig
    is_greedy: bool
    """Evaluations take the likeliest actions."""
    seed: int
    run_dir: str


class PolicySource(NamedTuple):
    """Where the policy comes from, the same in every worker."""

    config: PartConfig
    spec: RobotSpec
    path: str
    seed: int

    def open(self) -> Policy:
        if self.path:
            return load_policy(Path(self.path), self.spec)
        return open_policy(self.config, self.spec, seed=self.seed)
