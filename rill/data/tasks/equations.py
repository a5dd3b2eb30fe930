"""Linear equations in x with a whole solution: ax+b=c, and from level 3 on ax+b=cx+d.

The level is the size of the numbers: coefficients up to 3 · level, solutions up to 10 · level.
"""

from __future__ import annotations

import random
from typing import Literal

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset

BOTH_SIDES_FROM = 3


class EquationsDataset(TaskDataset):
    name = "equations"
    default_levels = (1, 4)

    class Config(TaskConfig):
        type: Literal["equations"] = "equations"
        negative: bool = False
        """Allow solutions below zero."""

    def make(self, rng: random.Random, level: int) -> Problem:
        config = self.settings
        assert isinstance(config, EquationsDataset.Config)
        x = rng.randint(-10 * level if config.negative else 0, 10 * level)
        a, b = rng.randint(2, 3 * level), rng.randint(1, 10 * level)
        if level < BOTH_SIDES_FROM:
            c = a * x + b
            return self._problem(f"{a}x+{b}", str(c), x, (f"{a}x={c - b}", f"x={x}"), level)
        c = rng.randint(1, a - 1)
        d = (a - c) * x + b
        right = f"{c}x+{d}" if d >= 0 else f"{c}x-{-d}"
        steps = (f"{a - c}x={d - b}", f"x={x}")
        return self._problem(f"{a}x+{b}", right, x, steps, level + 1)

    @staticmethod
    def _problem(left: str, right: str, x: int, steps: tuple[str, ...], difficulty: int) -> Problem:
        return Problem(
            question=f"{left}={right},x=",
            instruction=f"Solve for x: {left} = {right}. Answer with the value of x.",
            answer=str(x),
            steps=steps,
            difficulty=float(difficulty),
        )
