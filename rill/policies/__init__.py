"""Policies for robots: what decides on the next actions of an arm, with their probabilities and a value."""

from rill.policies.base import POLICIES, Evaluated, Policy, PolicyConfig, open_policy

__all__ = ["POLICIES", "Evaluated", "Policy", "PolicyConfig", "open_policy"]
