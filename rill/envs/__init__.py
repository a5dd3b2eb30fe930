"""Environments and rewards: what happens between a task and its reward."""

from rill.envs.agent import Agent, Agents
from rill.envs.base import ENVIRONMENTS, Environment, Policy, open_environment
from rill.envs.episode import run_episode

__all__ = ["ENVIRONMENTS", "Agent", "Agents", "Environment", "Policy", "open_environment", "run_episode"]
