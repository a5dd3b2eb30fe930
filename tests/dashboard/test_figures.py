from __future__ import annotations

from pathlib import Path

from rill.dashboard.figures import MAX_POINTS, FollowedFigures, thinned
from rill.telemetry.metrics import METRICS_FILE, MetricLog


def test_figures_are_followed_as_they_are_written(tmp_path: Path) -> None:
    followed = FollowedFigures(tmp_path)
    assert followed.now().columns["steps"] == []
    with MetricLog(tmp_path) as log:
        log.write(1, {"a": 1.0})
        followed.now()
        log.write(2, {"a": 2.0, "b": float("nan")})
    figures = followed.now()
    assert figures.columns["series"]["a"] == {"x": 0, "y": [1.0, 2.0]}
    assert figures.columns["series"]["b"]["y"] == [None]
    assert figures.columns["x"][0] == [1.0, 2.0]
    assert figures.last("a") == 2.0


def test_figures_that_a_thread_looks_at_do_not_change_while_another_reads_on(tmp_path: Path) -> None:
    followed = FollowedFigures(tmp_path)
    with MetricLog(tmp_path) as log:
        log.write(1, {"a": 1.0})
        log.write(2, {"a": 2.0})
        before = followed.now()
        log.write(2, {"b": 3.0})
        log.rewind(1)
        log.write(2, {"a": 4.0})
    assert followed.now().last("a") == 4.0
    assert (before.steps, before.last("a"), before.last("b")) == ([1, 2], 2.0, None)


def test_a_rewind_takes_back_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        for step in range(5):
            log.write(step, {"a": float(step)})
        log.rewind(2)
        log.write(3, {"a": 30.0})
    assert FollowedFigures(tmp_path).now().columns["series"]["a"]["y"] == [0.0, 1.0, 2.0, 30.0]


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    followed = FollowedFigures(tmp_path)
    for value in (1.0, 2.0):
        (tmp_path / METRICS_FILE).unlink(missing_ok=True)
        with MetricLog(tmp_path) as log:
            log.write(1, {"a": value})
        assert followed.now().last("a") == value


def test_a_long_curve_is_averaged_down_and_keeps_its_mean() -> None:
    x, y = thinned(list(range(100_000)), [float(i) for i in range(100_000)])
    assert len(x) == len(y) == MAX_POINTS
    assert abs(sum(y) / len(y) - 49_999.5) < 1.0


def test_a_damaged_line_costs_itself_only(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        log.write(1, {"a": 1.0})
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(
            b'{"step": "x", "time_s": 1, "values": {}}\n{"step": 2, "time_s": 1, "values": []}\n7\n{}\n'
        )
    assert FollowedFigures(tmp_path).now().steps == [1]
