from __future__ import annotations

import math

import numpy as np
import pytest

from rill.telemetry.paired import compare, sign_flip_p
from rill.telemetry.pass_at_k import pass_at_k


def test_single_answers_are_compared_by_mcnemars_exact_test() -> None:
    first = {f"p{i}": [0.0] for i in range(10)}
    second = {**first, **{f"p{i}": [1.0] for i in range(6)}}
    found = compare(first, second)
    assert found is not None
    assert (found.difference, found.num_gained, found.num_lost) == (0.6, 6, 0)
    assert found.p_value == pytest.approx(2 * 0.5**6)  # six coins on the same side, either one
    assert 0.2 < found.low < 0.6 < found.high <= 1.0


def test_the_same_answers_do_not_differ() -> None:
    rows = {"a": [1.0, 0.0], "b": [0.0, 0.0]}
    found = compare(rows, rows)
    assert found is not None
    assert (found.difference, found.p_value, found.low, found.high) == (0.0, 1.0, 0.0, 0.0)


def test_only_prompts_of_both_count_and_failures_are_wrong() -> None:
    found = compare({"a": [1.0], "x": [1.0]}, {"a": [math.nan], "y": [1.0]})
    assert found is not None
    assert (found.num_prompts, found.first, found.second) == (1, 1.0, 0.0)
    assert compare({"a": [1.0]}, {"b": [1.0]}) is None


def test_sampled_flips_agree_with_all_of_them() -> None:
    difference = np.array([0.5, 0.25, -0.25, 0.75, 0.5, 0.25, 0.5, -0.5])
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(difference))).reshape(len(difference), -1).T
    exact = float((np.abs(signs @ difference) >= abs(difference.sum()) - 1e-12).mean())
    assert sign_flip_p(difference) == pytest.approx(exact, abs=0.02)


def test_intervals_of_several_samples_have_a_width_even_where_all_prompts_agree() -> None:
    for value in (0.0, 1.0):
        estimate = pass_at_k([[value] * 8] * 20, 4)
        assert estimate.high - estimate.low > 0.1
    mixed = pass_at_k([[1.0, 0.0]] * 10 + [[0.0, 0.0]] * 10, 1)
    assert mixed.low < mixed.mean == 0.25 < mixed.high
