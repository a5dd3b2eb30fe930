"""Stand-in."""

from __future__ import annotations
from rill.errors import StuckError


def stuck(context: object, what: str, limit_s: float) -> StuckError:
    return StuckError(f"{what} waited {limit_s:g} s")
