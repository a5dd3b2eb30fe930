from __future__ import annotations

from pathlib import Path

import pytest

from rill.dashboard import indexer
from rill.dashboard.timeline import MAX_SPANS, Timeline, View
from rill.errors import UserError
from rill.telemetry.run import Run
from tests.dashboard.folders import append, process, small_run, span


def timeline_of(run: Run) -> Timeline:
    indexer.bring_up_to_date(run.path)
    return Timeline(indexer.trace_indexes(run.path))


def whole(timeline: Timeline, columns: int = 100) -> View:
    return View(from_s=0.0, to_s=timeline.seconds, num_columns=columns)


def test_devices_stand_first_and_are_one_lane_whoever_holds_them(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    append(
        run.path / "trace" / "actor[0]#0.jsonl", process("actor[0]#0"), span("actor[0]", "device 0", 1.0, 1.5)
    )
    timeline = timeline_of(run)
    assert timeline.lanes == [("", "device 0"), ("driver", "loop"), ("rollout[0]#0", "engine")]
    view = timeline.view(whole(timeline))
    assert {view["names"][one[1]] for one in view["spans"] if one[0] == 0} == {"rollout[0]", "actor[0]"}


def test_a_narrow_view_has_spans_with_times_since_the_runs_beginning(tmp_path: Path) -> None:
    timeline = timeline_of(small_run(tmp_path))
    view = timeline.view(View(from_s=1.1, to_s=1.2, num_columns=100))
    said = {(view["names"][one[1]], one[2], one[3]) for one in view["spans"]}
    assert {("train", 1.0, 1.5), ("step", 0.0, 3.0)} <= said
    assert timeline.seconds == pytest.approx(3.0)


def test_time_under_several_spans_counts_once(tmp_path: Path) -> None:
    timeline = timeline_of(small_run(tmp_path))
    busy = dict(zip(timeline.lanes, timeline.view(whole(timeline))["busy"]))
    assert busy["driver", "loop"] == pytest.approx(1.0)
    assert busy["", "device 0"] == pytest.approx(1 / 3, abs=0.01)


def test_many_spans_come_as_shares_of_columns_that_say_the_same(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    count = 3 * MAX_SPANS
    records = (span("decode", "gpu", i * 0.01, 0.005) for i in range(count))
    append(run.path / "trace" / "busy.jsonl", process("busy"), *records)
    timeline = timeline_of(run)
    for view in (whole(timeline), View(from_s=10.0, to_s=100.0, num_columns=50)):
        got = timeline.view(view)
        assert got["kind"] == "columns"
        lane = got["lanes"].index({"process": "busy", "lane": "gpu"})
        (shares,) = [
            values for of, name, values in got["columns"] if of == lane and got["names"][name] == "decode"
        ]
        assert sum(shares) / len(shares) / got["full"] == pytest.approx(0.5, abs=0.03)
        assert got["busy"][lane] == pytest.approx(0.5, abs=0.03)


def test_a_span_that_never_ended_is_seen_in_a_wide_view(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    many = (span("x", "else", i * 0.001, 0.0005) for i in range(2 * MAX_SPANS))
    stuck = {"kind": "open", "name": "stuck", "lane": "lane", "at_ns": span("", "", 2.0, 0)["at_ns"]}
    append(run.path / "trace" / "busy.jsonl", process("busy"), *many, stuck)
    timeline = timeline_of(run)
    got = timeline.view(whole(timeline))
    assert got["kind"] == "columns"
    assert "stuck" in got["names"]


def test_the_chunks_that_spans_worked_on_are_named(tmp_path: Path) -> None:
    timeline = timeline_of(small_run(tmp_path))
    view = timeline.view(whole(timeline))
    ((place, chunk),) = view["chunks"]
    assert (view["names"][view["spans"][place][1]], chunk) == ("rollout[0]", "7")


def test_a_span_can_be_asked_for_what_its_log_says(tmp_path: Path) -> None:
    timeline = timeline_of(small_run(tmp_path))
    view = timeline.view(whole(timeline))
    step = next(one for one in view["spans"] if view["names"][one[1]] == "step")
    assert timeline.span(step[4], step[5])["attributes"] == {"step": 1}
    for process_, offset in ((99, 0), (0, 3), (0, -1), (0, 10**12)):
        with pytest.raises(UserError):
            timeline.span(process_, offset)


def test_lanes_come_in_pages(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    append(
        run.path / "trace" / "many.jsonl",
        process("many"),
        *(span("x", f"lane {i:03d}", 0, 1) for i in range(300)),
    )
    timeline = timeline_of(run)
    view = timeline.view(View(from_s=0, to_s=3, num_columns=10, first_lane=290, num_lanes=60))
    assert len(view["lanes"]) == 303 - 290 == len(view["busy"])
    assert view["num_lanes"] == 303


def test_an_empty_trace_is_an_empty_view(tmp_path: Path) -> None:
    view = Timeline([]).view(View(from_s=0, to_s=1, num_columns=10))
    assert (view["lanes"], view["spans"]) == ([], [])


def test_the_longest_spans_stand_for_a_whole_run(tmp_path: Path) -> None:
    timeline = timeline_of(small_run(tmp_path))
    view = timeline.longest(2)
    assert min(one[3] for one in view["spans"]) >= 1.5
