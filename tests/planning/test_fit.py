"""Curves are chosen by what they predict, never fall, and say how far they may be off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import PlanError
from rill.planning.fit import fit


@pytest.mark.parametrize(
    ("family", "law"),
    [
        ("linear", lambda x: 3 + 0.5 * x),
        ("polynomial", lambda x: 1 + 0.01 * x * x),
        ("power", lambda x: 2 * x**0.6),
    ],
)
def test_the_law_behind_the_points_is_found(family: str, law: object) -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    curve = fit(sizes, [law(x) for x in sizes])  # type: ignore[operator]
    assert curve.family == family
    assert curve.at(256) == pytest.approx(law(256), rel=0.02)  # type: ignore[operator]
    assert curve.error < 0.02


def test_uncertainty_grows_outside_what_was_measured() -> None:
    noisy = np.random.default_rng(0).normal(1, 0.05, 6)
    curve = fit([1, 2, 4, 8, 16, 32], list((2 + 3 * np.array([1, 2, 4, 8, 16, 32])) * noisy))
    assert curve.spread(8) == curve.error
    assert curve.spread(32) < curve.spread(64) < curve.spread(1024)
    assert curve.spread(0.25) > curve.error


def test_one_size_is_taken_as_proportional_and_said_to_be_a_guess() -> None:
    curve = fit([64, 64], [2.0, 2.2])
    assert curve.at(128) == pytest.approx(4.2)
    assert curve.error >= 0.5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 1000), st.floats(0.001, 1000)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: p[0],
    )
)
def test_no_curve_falls_or_goes_below_zero(points: list[tuple[float, float]]) -> None:
    curve = fit([x for x, _ in points], [y for _, y in points])
    values = curve(np.geomspace(0.1, 1e5, 50))
    assert np.all(values >= 0)
    assert np.all(np.diff(values) >= -1e-9 * values[1:])
    assert curve.scaled(3.0).at(7.0) == pytest.approx(3.0 * curve.at(7.0))


@pytest.mark.parametrize("points", [([], []), ([0.0], [1.0]), ([1.0], [-1.0]), ([1.0], [float("nan")])])
def test_points_that_are_none_are_refused(points: tuple[list[float], list[float]]) -> None:
    with pytest.raises(PlanError):
        fit(*points)
