"""Learning-rate schedules: pure functions from an optimizer step to a factor of the peak rate.

Warm-up is linear from 1/warmup to 1. After it:

    constant   1
    linear     falls linearly to `final` at `total_steps`
    cosine     falls along half a cosine to `final` at `total_steps`
    wsd        stays at 1, then falls linearly to `final` over the last `decay_steps` (warm-up, stable, decay)
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from rill.config import Config


class Schedule(Config):
    """How the learning rate moves over optimizer steps."""

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up. 0: off."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps at which the rate reaches `final`. Needed by all but `constant`."""
    decay_steps: int = Field(default=0, ge=0)
    """Length of the last fall of `wsd`, in optimizer steps."""
    final: float = Field(default=0.0, ge=0.0, le=1.0)
    """Factor of the peak rate at the end and after it."""

    @model_validator(mode="after")
    def _fits(self) -> Schedule:
        if self.type != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.type!r} needs `total_steps`")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves nothing of total_steps {self.total_steps}"
            )
        if self.type == "wsd" and not 0 < self.decay_steps <= (self.total_steps or 0) - self.warmup_steps:
            raise ValueError("schedule 'wsd' needs `decay_steps` between 1 and total_steps − warmup_steps")
        return self

    def factor(self, step: int) -> float:
        """The factor for the optimizer step that follows `step` finished ones."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.type == "constant" or self.total_steps is None:
            return 1.0
        start = self.total_steps - self.decay_steps if self.type == "wsd" else self.warmup_steps
        progress = min(1.0, max(0.0, (step - start) / max(1, self.total_steps - start)))
        if self.type == "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            shape = 1.0 - progress
        return self.final + (1.0 - self.final) * shape
