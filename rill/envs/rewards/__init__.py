"""Rewards: one file each, chosen by name, run with deadlines by RewardRunner."""

from rill.envs.rewards.base import REWARDS, Isolation, Reward, RewardConfig
from rill.envs.rewards.runner import RewardRunner, ScoringConfig

__all__ = ["REWARDS", "Isolation", "Reward", "RewardConfig", "RewardRunner", "ScoringConfig"]
