"""Sandboxes: where programs run that nobody has read."""

from rill.envs.sandbox.base import SANDBOXES, Limits, Result, Sandbox, SandboxError, open_sandbox
from rill.envs.sandbox.pool import SandboxPool

__all__ = ["SANDBOXES", "Limits", "Result", "Sandbox", "SandboxError", "SandboxPool", "open_sandbox"]
