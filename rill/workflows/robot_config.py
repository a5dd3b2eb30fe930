"""The recipe of an embodied run: a simulator, a policy, and the tables that every run of the loop has."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rill.algorithms.embodied import EmbodiedAlgorithmConfig, Estimator
from rill.config import OneOf, PartConfig
from rill.data.initial_states import InitialStates
from rill.envs.robots.base import SIMULATORS
from rill.policies.base import POLICIES
from rill.telemetry.guards import Guard, default_guards, with_actions
from rill.telemetry.robot_guards import SHARED, WATCHED
from rill.training.robots import ROBOT_TRAINERS, RobotTrainer
from rill.workers.robots.config import ImitationConfig, RobotRolloutConfig
from rill.workflows.config import MISMATCH_LIMITS, ClusterConfig, OnlineConfig, PlacementConfig, Seats


class RobotPlacementConfig(PlacementConfig):
    """Simulators take turns with the trainer alone, and only where they run on the device."""

    env: Seats | None = None
    """Unset: where the policy is, a worker beside each."""
    rollout: Seats = "0"
    actor: Seats = "0"


class RobotClusterConfig(ClusterConfig):
    threads: int = Field(default=1, ge=1)
    """Of each worker process. Policies are small: more threads rarely help."""


class RobotConfig(OnlineConfig):
    """The tables of an embodied recipe."""

    simulator: Annotated[PartConfig, OneOf(SIMULATORS)]
    policy: Annotated[PartConfig, OneOf(POLICIES)]
    policy_path: str = ""
    """A folder with a policy that another run left (its `model`). Empty: a fresh one."""
    data: InitialStates.Config
    rollout: RobotRolloutConfig = RobotRolloutConfig()
    algorithm: EmbodiedAlgorithmConfig = EmbodiedAlgorithmConfig()
    trainer: Annotated[PartConfig, OneOf(ROBOT_TRAINERS)] = Field(default_factory=RobotTrainer.Config)
    """"ppo" (GRPO with algorithm.estimator = "group") or "sac"."""
    imitation: ImitationConfig = ImitationConfig()
    cluster: RobotClusterConfig = RobotClusterConfig()
    placement: RobotPlacementConfig = Field(default_factory=RobotPlacementConfig)

    handed_down = {**OnlineConfig.handed_down, "data.suite": "simulator.type"}

    warm_up_table = "imitation"

    @property
    def model_name(self) -> str:
        policy = self.policy.model_dump()
        return self.policy_path or "-".join(str(policy.get(key)) for key in ("type", "depth", "width"))

    @property
    def keeping_all(self) -> dict[str, Any]:
        return {"min_success": 0.0, "max_success": 1.0}

    @property
    def together(self) -> tuple[str, ...]:
        """Simulators give back no memory, and a policy that decides on every chunk of theirs stays beside them: it has
        room where the trainer has it later."""
        return tuple(dict.fromkeys(("env", "rollout", *super().together)))

    def guards(self) -> list[Guard]:
        everywhere = default_guards(max_lag=self.loop.max_lag, mismatch_limit=MISMATCH_LIMITS["float32"])
        return with_actions([*(g for g in everywhere if g.name in SHARED), *WATCHED], self.guard_actions)

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        if self.algorithm.estimator is Estimator.GROUP and self.rollout.group_size < 2:
            raise ValueError(
                "algorithm.estimator = 'group' compares episodes from one initial state: set rollout.group_size to 8, "
                "or estimator = 'gae'"
            )
        if self.loop.overprovision:
            raise ValueError(
                "loop.overprovision stops answers in the middle; an episode of a robot cannot be"
            )
        if self.cluster.type == "ray" and self.policy_path:
            raise ValueError(
                "policy_path is read on every node: put it where all can see it, and use a local cluster"
            )
        return self
