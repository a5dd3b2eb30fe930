from __future__ import annotations

import json
from pathlib import Path

import pytest

from rill.errors import ConfigError, GuardError
from rill.telemetry.guards import GUARDS_FILE, GuardWatch, default_guards, room_left, with_actions


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
        ("mismatch/kl_k3", 0.5, 2, "mismatch kl"),
        ("mismatch/abs_max", 20.0, 2, "mismatch max"),
        ("mismatch/ess", 0.2, 2, "effective samples"),
        ("policy/entropy", 0.0, 2, "entropy collapse"),
        ("reward/std", 0.0, 2, "no signal"),
        ("length/repeated", 0.5, 2, "repetition"),
        ("correction/dropped", 0.6, 2, "masked tokens"),
        ("mismatch/outside", 0.3, 2, "mismatch tail"),
        ("memory/available", 0.01, 1, "memory"),
        ("disk/checkpoints_left", 0.5, 1, "disk"),
        ("length/truncated", 0.9, 2, "truncated answers"),
        ("rollout/errors", 0.5, 2, "failing rewards"),
        ("length/response", 1.0, 2, "empty answers"),
        ("policy/clipped", 0.4, 2, "clipped updates"),
        ("policy/kl", 2.5, 2, "large updates"),
        ("grad_norm", 0.0, 2, "no update"),
        ("rollout/no_tool_call", 1.0, 2, "tools never called"),
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


def test_a_figure_at_its_bound_is_named_once_and_again_after_some_good_steps(tmp_path: Path) -> None:
    guards = watch(tmp_path)
    shares = [0.6, 0.6, 0.4, 0.6, 0.6, *[0.4] * 5, 0.6, 0.4, 0.6, 0.6]
    told = [step for step, share in enumerate(shares) if guards.check(step, {"length/truncated": share})]
    assert told == [1, 13]


def test_a_gradient_that_is_not_finite_is_told_and_one_that_stays_so_stops_the_run(tmp_path: Path) -> None:
    guards = watch(tmp_path)
    (found,) = guards.check(1, {"grad_norm": float("nan")})
    assert (found.guard, found.action) == ("gradient", "warn")
    for step in range(2, 5):
        guards.check(step, {"grad_norm": float("inf")})
    with pytest.raises(GuardError, match="step 5: no finite gradient"):
        guards.check(5, {"grad_norm": float("inf")})


@pytest.mark.parametrize(
    ("metric", "usual", "jump", "leap", "name"),
    [
        ("reward/mean", 0.3, 0.7, 1.1, "reward jump"),
        ("reward/mean", 40.0, 55.0, 65.0, "reward jump"),
        ("length/response", 40.0, 130.0, 300.0, "length drift"),
        ("length/response", 40.0, 12.0, 5.0, "length drift"),
        ("policy/entropy", 1.0, 0.04, 0.02, "entropy collapse"),
    ],
)
@pytest.mark.parametrize("num_before", [3, 12])
def test_a_figure_that_leaves_its_course_is_named_at_once_and_one_that_climbs_is_not(
    tmp_path: Path, metric: str, usual: float, jump: float, leap: float, name: str, num_before: int
) -> None:
    climbing = watch(tmp_path / "climbing")
    assert [climbing.check(step, {metric: usual * (1 + 0.04 * step)}) for step in range(40)] == [[]] * 40

    def findings(value: float) -> list[str]:
        watching = watch(tmp_path / str(value))
        course = [usual + 0.001 * (step % 3) for step in range(num_before)]
        told = [watching.check(step, {metric: each}) for step, each in enumerate([*course, value, value])]
        assert not any(told[:num_before])
        return [finding.guard for found in told for finding in found]

    assert findings(leap) == [name], "within two steps"
    assert findings(jump) == ([name] if num_before == 12 else []), "few steps are no course yet"


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


def test_only_what_may_become_well_while_a_run_waits_can_pause_it(tmp_path: Path) -> None:
    defaults = default_guards(max_lag=0, mismatch_limit=1e-3)
    with pytest.raises(ConfigError, match="'entropy collapse' cannot pause"):
        with_actions(defaults, {"entropy collapse": "pause"})
    (memory,) = (guard for guard in with_actions(defaults, {"memory": "pause"}) if guard.name == "memory")
    pausing = GuardWatch(tmp_path, [memory])
    (found,) = pausing.check(
        1, {"memory/available": 0.01}, lambda: {**room_left(tmp_path, 0), memory.metric: 0.5}
    )
    assert found.action == "pause"


def test_a_sample_under_another_groups_id_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="misplaced samples"):
        watch(tmp_path).check(1, {"groups/misplaced": 2.0})
