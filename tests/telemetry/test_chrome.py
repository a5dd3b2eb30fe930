from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rill.errors import UserError
from rill.telemetry.chrome import export_chrome, read_trace
from rill.telemetry.jsonl import encode_line


def write_trace(run_dir: Path, process: str, *records: dict[str, Any], tail: bytes = b"") -> None:
    folder = run_dir / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    header = {"kind": "process", "process": process, "pid": 1, "host": "h", "at_ns": 0}
    lines = b"".join(encode_line(record) for record in (header, *records))
    (folder / f"{process}.jsonl").write_bytes(lines + tail)


def span(name: str, at_ns: int, duration_ns: int, lane: str = "main") -> dict[str, Any]:
    return {"kind": "span", "name": name, "at_ns": at_ns, "lane": lane, "duration_ns": duration_ns}


def exported(run_dir: Path) -> list[dict[str, Any]]:
    out = run_dir / "out.json"
    export_chrome(run_dir, out)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


def test_processes_lanes_and_times_survive_the_export(tmp_path: Path) -> None:
    write_trace(tmp_path, "driver", span("plan", 1000, 500))
    write_trace(
        tmp_path,
        "worker-0",
        span("train", 2000, 3000, lane="cuda:0"),
        {"kind": "counter", "name": "queue", "at_ns": 2500, "value": 3.0},
        {"kind": "instant", "name": "sync", "at_ns": 2600, "lane": "cuda:0", "attributes": {"version": 1}},
    )
    events = exported(tmp_path)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"driver", "main", "worker-0", "cuda:0"}
    train = next(e for e in events if e["name"] == "train")
    assert (train["ph"], train["ts"], train["dur"]) == ("X", 2.0, 3.0)
    assert next(e for e in events if e["ph"] == "C")["args"] == {"value": 3.0}
    assert next(e for e in events if e["ph"] == "i")["args"] == {"version": 1}
    assert len({e["pid"] for e in events}) == 2


def test_nested_spans_share_a_row_and_overlapping_ones_do_not(tmp_path: Path) -> None:
    write_trace(
        tmp_path,
        "p",
        span("outer", 0, 100),
        span("inner", 10, 20),
        span("task", 50, 100),
        span("later", 200, 10),
    )
    row = {e["name"]: e["tid"] for e in exported(tmp_path) if e["ph"] == "X"}
    assert row["outer"] == row["inner"] == row["later"]
    assert row["task"] != row["outer"]


def test_an_unfinished_span_lasts_until_its_process_last_wrote(tmp_path: Path) -> None:
    write_trace(
        tmp_path,
        "p",
        {"kind": "open", "name": "stuck", "at_ns": 100, "lane": "main"},
        span("other", 300, 50),
        tail=b'{"kind":"sp',
    )
    (stuck,) = [event for event in read_trace(tmp_path) if event.name == "stuck"]
    assert (stuck.kind, stuck.duration_ns) == ("open", 250)
    shown = next(e for e in exported(tmp_path) if e["name"] == "stuck")
    assert shown["args"]["unfinished"] is True


def test_a_run_without_a_trace_is_an_error_that_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trace in"):
        export_chrome(tmp_path, tmp_path / "out.json")
