from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from rill.telemetry.metrics import MetricLog, read_metrics


def test_the_log_is_readable_while_it_is_written(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    log.write(1, {"reward": 0.5})
    assert [row.values for row in read_metrics(tmp_path)] == [{"reward": 0.5}]
    log.write(2, {"reward": 0.75})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":3,"val')
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2]


def test_several_writes_for_one_step_add_up(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        log.write(1, {"loss": 1.0})
        log.write(1, {"eval": 2.0, "loss": 3.0})
    (row,) = read_metrics(tmp_path)
    assert row.values == {"loss": 3.0, "eval": 2.0}


def test_a_rewind_makes_later_steps_void(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        for step in range(1, 6):
            log.write(step, {"loss": float(step)})
    with MetricLog(tmp_path) as resumed:
        resumed.rewind(3)
        resumed.write(4, {"loss": 40.0})
    assert [(row.step, row.values["loss"]) for row in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    with MetricLog(tmp_path) as log:
        log.write(1, {"nan": math.nan, "inf": -math.inf})
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row.values["nan"])
    assert row.values["inf"] == -math.inf


class RecordingSink:
    def __init__(self, fails_at: int = -1) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at
        self.is_closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the tracker is away")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def test_sinks_get_every_step_and_are_closed(tmp_path: Path) -> None:
    sink = RecordingSink()
    with MetricLog(tmp_path, [sink]) as log:
        log.write(1, {"loss": 1.0})
    assert sink.rows == [(1, {"loss": 1.0})]
    assert sink.is_closed


def test_a_failing_sink_is_dropped_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = RecordingSink(fails_at=1), RecordingSink()
    with MetricLog(tmp_path, [bad, good]) as log:
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 2.0})
    assert bad.rows == []
    assert [step for step, _ in good.rows] == [1, 2]
    assert len(read_metrics(tmp_path)) == 2
    assert "the tracker is away" in caplog.text
