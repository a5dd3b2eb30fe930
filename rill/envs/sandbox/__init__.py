"""Sandboxes: where programs run that nobody has read."""

from rill.envs.sandbox.base import SANDBOXES, Limits, Result, SandboxError, missing, open_sandbox
from rill.envs.sandbox.pool import SandboxPool
from rill.envs.sandbox.session import Sandbox

__all__ = [
    "SANDBOXES",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxPool",
    "missing",
    "open_sandbox",
]
