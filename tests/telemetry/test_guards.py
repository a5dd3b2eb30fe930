from __future__ import annotations

import json
from pathlib import Path

import pytest

from rill.errors import ConfigError, GuardError
from rill.telemetry.guards import GUARDS_FILE, GuardWatch, default_guards, with_actions


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
        ("reward/std", 0.0, 2, "no signal"),
        ("length/repeated", 0.5, 2, "repetition"),
        ("correction/dropped", 0.6, 2, "masked tokens"),
        ("mismatch/outside", 0.3, 2, "mismatch tail"),
        ("memory/available", 0.01, 1, "memory"),
        ("disk/checkpoints_left", 0.5, 1, "disk"),
        ("length/truncated", 0.9, 3, "truncated answers"),
        ("rollout/errors", 0.5, 2, "failing rewards"),
        ("length/response", 1.0, 3, "empty answers"),
        ("policy/clipped", 0.4, 2, "clipped updates"),
        ("policy/kl", 2.5, 2, "large updates"),
        ("grad_norm", 0.0, 3, "no update"),
        ("rollout/no_tool_call", 1.0, 3, "tools never called"),
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


def test_a_gradient_that_is_not_finite_is_told_and_one_that_stays_so_stops_the_run(tmp_path: Path) -> None:
    guards = watch(tmp_path)
    (found,) = guards.check(1, {"grad_norm": float("nan")})
    assert (found.guard, found.action) == ("gradient", "warn")
    for step in range(2, 5):
        guards.check(step, {"grad_norm": float("inf")})
    with pytest.raises(GuardError, match="step 5: no finite gradient"):
        guards.check(5, {"grad_norm": float("inf")})


@pytest.mark.parametrize(
    ("metric", "usual", "jump", "name"),
    [("reward/mean", 0.3, 0.95, "reward jump"), ("length/response", 40.0, 300.0, "length drift")],
)
def test_a_figure_that_leaves_its_course_is_named_and_one_that_climbs_is_not(
    tmp_path: Path, metric: str, usual: float, jump: float, name: str
) -> None:
    climbing = watch(tmp_path / "climbing")
    assert [climbing.check(step, {metric: usual * (1 + 0.04 * step)}) for step in range(40)] == [[]] * 40
    jumping = watch(tmp_path / "jumping")
    assert not any(jumping.check(step, {metric: usual + 0.001 * (step % 3)}) for step in range(12))
    (found,) = jumping.check(12, {metric: jump})
    assert found.guard == name


def test_a_full_disk_pauses_the_run_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rill.telemetry.guards.PAUSE_POLL_S", 0.001)
    left = iter([0.2, 0.4, 9.0])
    looks: list[float] = []

    def look_again() -> dict[str, float]:
        looks.append(next(left))
        return {"disk/checkpoints_left": looks[-1]}

    guards = watch(tmp_path)
    (found,) = guards.check(1, {"disk/checkpoints_left": 0.1}, look_again)
    assert (found.guard, found.action, looks) == ("disk", "pause", [0.2, 0.4, 9.0])
    monkeypatch.setattr("rill.telemetry.guards.PAUSE_S", 0.01)
    with pytest.raises(GuardError, match="Nothing changed within"):
        guards.check(2, {"disk/checkpoints_left": 0.1}, lambda: {"disk/checkpoints_left": 0.1})


def test_a_recipe_changes_what_follows_from_a_finding_and_a_wrong_name_is_an_error(tmp_path: Path) -> None:
    guards = with_actions(default_guards(max_lag=0, mismatch_limit=1e-3), {"lag": "stop", "disk": "off"})
    stops = GuardWatch(tmp_path, guards)
    assert stops.check(1, {"disk/checkpoints_left": 0.0}) == []
    with pytest.raises(GuardError, match="lag"):
        stops.check(2, {"lag/max": 3.0})
    with pytest.raises(ConfigError, match="guard 'lagg'.*lag"):
        with_actions(guards, {"lagg": "stop"})


def test_a_sample_under_another_groups_id_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="misplaced samples"):
        watch(tmp_path).check(1, {"groups/misplaced": 2.0})
