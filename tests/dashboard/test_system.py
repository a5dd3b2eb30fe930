"""What processes used over time, from the counters of their traces."""

from __future__ import annotations

from pathlib import Path

from rill.dashboard import indexer
from rill.dashboard.system import counter_series
from tests.dashboard.folders import BEGIN_NS, SECOND, append, process


def test_the_time_between_a_kill_and_a_resume_is_a_gap(tmp_path: Path) -> None:
    seconds = [*range(0, 50, 5), *range(1000, 1050, 5)]
    counters = [
        {"kind": "counter", "name": "process/cpu", "at_ns": BEGIN_NS + at * SECOND, "value": 0.5}
        for at in seconds
    ]
    append(tmp_path / "trace" / "driver.jsonl", process("driver"), *counters)
    indexer.bring_up_to_date(tmp_path)
    [series] = counter_series(indexer.trace_indexes(tmp_path), BEGIN_NS)
    assert series["y"].count(None) == 1
    gap = series["y"].index(None)
    assert series["x"][gap - 1 : gap + 2] == [45.0, 46.0, 1000.0]
    assert len(series["x"]) == len(seconds) + 1
