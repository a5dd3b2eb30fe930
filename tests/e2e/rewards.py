"""Rewards of the end-to-end runs; in a file of their own, which workers import in no time."""

from __future__ import annotations

import time

from rill.types import Prompt, Trajectory


def share_of_digits(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """Any model gets some of it, so that there is something to learn from the first step on."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def constant(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A reward that does not look at the answer."""
    return 1.0


def slowly(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """Holds the engine that it runs in, so that two of them are quicker than one."""
    time.sleep(0.1)
    return share_of_digits(prompt, text, trajectory)
