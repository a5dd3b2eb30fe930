"""One HTML file that shows a run: curves, the timeline of who used which device when, the rollouts, the config.

Made by `rill report RUN` and at the end of `rill train`. Reads the run folder only, so it works on a run that goes
on, was killed, or was copied from elsewhere. The file needs no network and no server. Model text reaches the page as
JSON and is shown through textContent, so markup in a rollout is text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rill.errors import UserError
from rill.telemetry.chrome import Event, read_trace
from rill.telemetry.guards import FINDING_FIELDS, GUARDS_FILE
from rill.telemetry.jsonl import read_lines
from rill.telemetry.metrics import MetricRow, read_metrics
from rill.telemetry.rollouts import read_rollouts
from rill.telemetry.run import Run, write_atomically

DEVICE_LANE = "device "
"""How the lanes of devices begin; a lock's holder writes its turns there."""
MAX_SPANS = 20_000
STEP_PARTS = {
    "time/rollout_wait_s": "waiting for rollouts",
    "time/train_s": "training",
    "time/sync_s": "weight sync",
}
"""The figures that a step's time is made of, and what the page calls them."""
PHASE_PARTS = {"warm_up": "warm-up", "evaluate": "evaluation"}
"""The same for spans outside the steps, by the last part of their names."""
MAX_GROUPS = 400


def write_report(run: Run, out: Path | None = None) -> Path:
    """The path of the page; by default `report.html` in the run folder."""
    target = out if out is not None else run.path / "report.html"
    data = collect(run)
    if not data["metrics"]["steps"] and not data["timeline"]["lanes"]:
        raise UserError(f"{run.path} has neither metrics nor a trace yet: nothing to report")
    template = resources.files("rill.dashboard").joinpath("report.html").read_text(encoding="utf-8")
    # "<" cannot end the script element or open a comment when it is written as an escape.
    payload = json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c")
    write_atomically(target, template.replace("/*DATA*/null", payload))
    return target


def collect(run: Run) -> dict[str, Any]:
    state, rows = run.state(), read_metrics(run.path)
    return {
        "name": run.name,
        "status": state.status.value,
        "message": state.message,
        "seconds": state.lasted_s(rows[-1].time_s if rows else 0.0),
        "metrics": _metrics(rows),
        "timeline": _timeline(run),
        "shares": _shares(run, rows),
        "rollouts": _rollouts(run),
        "findings": list(read_lines(run.path / GUARDS_FILE, *FINDING_FIELDS)),
        "config": run.config_path.read_text(encoding="utf-8") if run.config_path.exists() else "",
    }


def _metrics(rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Columns: for each name the steps it has and its values."""
    series: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"x": [], "y": []})
    steps = set()
    for row in rows:
        steps.add(row.step)
        for name, value in row.values.items():
            series[name]["x"].append(row.step)
            series[name]["y"].append(float(f"{value:.5g}"))
    return {"steps": sorted(steps), "series": series}


def _shares(run: Run, rows: Sequence[MetricRow]) -> list[tuple[str, float]]:
    """Where the time went: (what, seconds), the longest first. Ranks that do the same at once count once."""
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, what in STEP_PARTS.items():
            seconds[what] += row.values.get(name, 0.0)
    by_process: dict[tuple[str, str], float] = defaultdict(float)
    for event in read_trace(run.path):
        what = PHASE_PARTS.get(event.name.rpartition(".")[2], "")
        if what and event.kind in ("span", "open"):
            by_process[what, event.process] += event.duration_ns / 1e9
    for (what, _), spent_s in by_process.items():
        seconds[what] = max(seconds[what], spent_s)
    return sorted(((what, s) for what, s in seconds.items() if s > 0), key=lambda part: -part[1])


def _timeline(run: Run) -> dict[str, Any]:
    events = [event for event in read_trace(run.path) if event.kind in ("span", "open")]
    if not events:
        return {"lanes": [], "spans": [], "begin_ns": 0, "seconds": 0}
    begin_ns = min(event.at_ns for event in events)
    end_ns = max(event.at_ns + event.duration_ns for event in events)
    if len(events) > MAX_SPANS:
        events = sorted(events, key=lambda event: -event.duration_ns)[:MAX_SPANS]
    lanes: dict[tuple[str, str], int] = {}
    spans = []
    for event in sorted(events, key=_lane_order):
        lane = lanes.setdefault(_lane(event), len(lanes))
        start_s = (event.at_ns - begin_ns) / 1e9
        detail = ", ".join(f"{name}={value}" for name, value in event.attributes.items())
        spans.append([lane, event.name, round(start_s, 6), round(event.duration_ns / 1e9, 6), detail])
    return {
        "lanes": [{"process": process, "lane": lane} for process, lane in lanes],
        "spans": spans,
        "seconds": (end_ns - begin_ns) / 1e9,
    }


def _lane(event: Event) -> tuple[str, str]:
    """A device is one lane, whoever holds it: that two parts take turns is seen at a glance."""
    return ("", event.lane) if event.lane.startswith(DEVICE_LANE) else (event.process, event.lane)


def _lane_order(event: Event) -> tuple[bool, tuple[str, str], int]:
    """Devices first."""
    process, lane = _lane(event)
    return (process != "", (process, lane), event.at_ns)


def _rollouts(run: Run) -> list[Any]:
    groups = read_rollouts(run)
    if len(groups) > MAX_GROUPS:  # spread over the run rather than its beginning
        groups = [groups[int(i * len(groups) / MAX_GROUPS)] for i in range(MAX_GROUPS)]
    return groups
