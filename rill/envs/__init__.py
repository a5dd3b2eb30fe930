"""Environments: what a prompt is put through, and how the outcome is rewarded."""

from rill.envs.base import ENVIRONMENTS, Environment, Policy, open_environment
from rill.envs.trajectory_builder import TrajectoryBuilder, response_text

__all__ = ["ENVIRONMENTS", "Environment", "Policy", "TrajectoryBuilder", "open_environment", "response_text"]
