"""Curves through measured points: linear, polynomial or power law, whichever predicts best what it has not seen.

Coefficients are never negative, so a curve never falls where more work is given to it. `error` is the mean relative
error on points held out, one size at a time, the smallest and largest included; `spread(x)` says how far off a
prediction may be at x, and grows with each doubling beyond what was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rill.errors import PlanError
from rill.planning.frontier import Floats

Family = Literal["linear", "polynomial", "power"]
FAMILIES: tuple[Family, ...] = ("linear", "polynomial", "power")

_STEEPEST = 3.0
"""Exponent of a power law: nothing measured here grows faster, though points close to each other may seem to."""
_UNKNOWN_ERROR = 0.5
"""Of a curve with nothing to hold out: one size was measured, and the rest is assumed proportional."""


@dataclass(frozen=True, slots=True)
class Curve:
    family: Family
    coefficients: tuple[float, ...]
    """a + b·x, a + b·x + c·x², or a·x^b."""
    error: float = 0.0
    smallest: float = 0.0
    largest: float = math.inf
    """The range that was measured."""

    def __call__(self, x: Floats) -> Floats:
        if self.family == "power":
            scale, exponent = self.coefficients
            result: Floats = scale * np.power(np.asarray(x, np.float64), exponent)
            return result
        total = np.zeros_like(np.asarray(x, np.float64))
        for coefficient in reversed(self.coefficients):
            total = total * x + coefficient
        return total

    def at(self, x: float) -> float:
        return float(self(np.array([float(x)]))[0])

    def scaled(self, factor: float) -> Curve:
        """The same curve, so many times as high."""
        first, *rest = self.coefficients
        others = rest if self.family == "power" else [c * factor for c in rest]
        return replace(self, coefficients=(first * factor, *others))

    def spread(self, x: float) -> float:
        """Relative uncertainty at x: the held-out error, and half of it again for each doubling outside."""
        doublings = 0.0
        if x > self.largest > 0:
            doublings = math.log2(x / self.largest)
        elif 0 < x < self.smallest:
            doublings = math.log2(self.smallest / x)
        return self.error * (1.0 + doublings / 2)


def constant(value: float) -> Curve:
    return Curve("linear", (value, 0.0))


def line(fixed: float, slope: float) -> Curve:
    return Curve("linear", (fixed, slope))


def fit(x: Sequence[float], y: Sequence[float]) -> Curve:
    """The family with the least held-out error; the simpler one where they tie."""
    if not x or len(x) != len(y):
        raise PlanError(f"a curve needs points: got {len(x)} sizes and {len(y)} values")
    if min(x) <= 0 or min(y) < 0 or not all(map(math.isfinite, (*x, *y))):
        raise PlanError(f"a curve needs sizes above 0 and values from 0: got {list(zip(x, y))[:8]}")
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    sizes = np.unique(xs)
    if len(sizes) == 1:
        slope = float(ys.mean() / sizes[0])
        return Curve("linear", (0.0, slope), _UNKNOWN_ERROR, float(sizes[0]), float(sizes[0]))
    best: Curve | None = None
    for family in FAMILIES:
        if family == "polynomial" and len(sizes) < 4:
            continue  # it would pass through everything and predict nothing
        error = _held_out_error(family, xs, ys, sizes)
        if best is None or error < best.error * 0.95:
            best = Curve(family, _solve(family, xs, ys), error, float(sizes[0]), float(sizes[-1]))
    assert best is not None
    return best


def _held_out_error(family: Family, xs: Floats, ys: Floats, sizes: Floats) -> float:
    if len(sizes) < 3:
        inside = Curve(family, _solve(family, xs, ys))(xs)
        return max(_UNKNOWN_ERROR / 4, float(np.mean(_relative(inside, ys))))
    errors = []
    for size in sizes:
        is_held = xs == size
        curve = Curve(family, _solve(family, xs[~is_held], ys[~is_held]))
        errors.append(float(np.mean(_relative(curve(xs[is_held]), ys[is_held]))))
    return float(np.mean(errors))


def _relative(predicted: Floats, real: Floats) -> Floats:
    return np.abs(predicted - real) / np.maximum(real, 1e-12)


def _solve(family: Family, xs: Floats, ys: Floats) -> tuple[float, ...]:
    if family == "power":
        if len(np.unique(xs)) == 1:
            return (float(ys.mean() / xs[0]), 1.0)
        logs = np.log(np.maximum(ys, 1e-12))
        exponent = min(_STEEPEST, max(0.0, float(np.polyfit(np.log(xs), logs, 1)[0])))
        return (float(np.exp(np.mean(logs - exponent * np.log(xs)))), exponent)
    degree = 1 if family == "linear" else 2
    powers = np.stack([xs**d for d in range(degree + 1)], axis=1)
    return _least_squares(powers, ys)


def _least_squares(columns: Floats, ys: Floats) -> tuple[float, ...]:
    """Least relative squares with no coefficient below zero: the best of all sets of columns whose solution
    has none."""
    weights = 1.0 / np.maximum(ys, 1e-12)
    best, best_error = np.zeros(columns.shape[1]), math.inf
    for num in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), num):
            some = columns[:, chosen] * weights[:, None]
            solved = np.linalg.lstsq(some, ys * weights, rcond=None)[0]
            error = float(np.sum((some @ solved - ys * weights) ** 2))
            if np.all(solved >= 0) and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(chosen)] = solved
    return tuple(float(value) for value in best)
