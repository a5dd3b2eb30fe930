from __future__ import annotations

import json
from pathlib import Path

import pytest

from rill.errors import GuardError
from rill.telemetry.guards import GUARDS_FILE, GuardWatch, default_guards


def watch(folder: Path, max_lag: int = 0) -> GuardWatch:
    return GuardWatch(folder, default_guards(max_lag=max_lag, mismatch_limit=1e-3))


def test_a_healthy_step_finds_nothing(tmp_path: Path) -> None:
    healthy = {
        "lag/max": 0.0,
        "mismatch/abs_mean": 1e-6,
        "mismatch/ess": 1.0,
        "policy/entropy": 0.5,
        "reward/std": 0.4,
        "length/response": 12.5,
        "length/truncated": 0.1,
        "policy/clipped": 0.05,
        "rollout/errors": 0.0,
        "grad_norm": 0.3,
    }
    assert watch(tmp_path).check(1, healthy) == []


@pytest.mark.parametrize(
    ("metric", "value", "patience", "name"),
    [
        ("lag/max", 1.0, 1, "lag"),
        ("mismatch/abs_mean", 0.5, 2, "mismatch"),
        ("mismatch/ess", 0.2, 2, "effective samples"),
        ("policy/entropy", 0.0, 5, "entropy collapse"),
        ("reward/std", 0.0, 3, "no signal"),
        ("length/truncated", 0.9, 3, "truncated answers"),
        ("rollout/errors", 0.5, 2, "failing rewards"),
        ("length/response", 1.0, 3, "empty answers"),
        ("policy/clipped", 0.8, 2, "clipped updates"),
        ("grad_norm", 0.0, 3, "no update"),
    ],
)
def test_each_fault_is_named_after_its_patience_and_once(
    tmp_path: Path, metric: str, value: float, patience: int, name: str
) -> None:
    guards = watch(tmp_path)
    found = [guards.check(step, {metric: value}) for step in range(patience + 3)]
    assert [len(f) for f in found] == [int(step == patience - 1) for step in range(patience + 3)]
    assert found[patience - 1][0].guard == name
    written = [json.loads(line) for line in (tmp_path / GUARDS_FILE).read_text().splitlines()]
    assert [record["guard"] for record in written] == [name]


def test_a_fault_that_went_away_and_came_back_is_named_again(tmp_path: Path) -> None:
    guards = watch(tmp_path)
    counts = [len(guards.check(step, {"lag/max": lag})) for step, lag in enumerate([1.0, 0.0, 1.0])]
    assert counts == [1, 0, 1]


def test_rewards_of_which_every_one_fails_stop_the_run(tmp_path: Path) -> None:
    guards = watch(tmp_path)
    for step, share in enumerate([1.0, 1.0, 0.9, 1.0, 1.0]):
        guards.check(step, {"rollout/errors": share})
    with pytest.raises(GuardError, match="no reward.*Every single reward failed"):
        guards.check(5, {"rollout/errors": 1.0})


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="gradient"):
        watch(tmp_path).check(3, {"grad_norm": float("nan")})
