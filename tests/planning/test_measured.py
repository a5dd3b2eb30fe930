"""Points come out of what a run left behind: call records where there are any, the trace where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from rill.errors import PlanError
from rill.planning.graph import CallRecord, Traffic, Turn
from rill.planning.measured import profile_of_run, workers_of_calls
from rill.telemetry.jsonl import encode_line
from rill.telemetry.run import Run

S = 1_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three steps of a rollout worker (2 s, 0.5 s of it waiting) and an actor (3 s), 32 samples each."""
    run = Run.create("small", root=tmp_path, config_toml='[model]\npath = "models/tiny"\n')
    lines: dict[str, list[dict[str, object]]] = {"driver": [], "rollout[0]": [], "actor[0]": []}

    def span(process: str, lane: str, name: str, at: float, lasts: float, **attributes: object) -> None:
        record = {
            "kind": "span",
            "name": name,
            "at_ns": int(at * S),
            "duration_ns": int(lasts * S),
            "lane": lane,
        }
        lines[process].append(record | ({"attributes": attributes} if attributes else {}))

    for step in range(3):
        at = step * 10.0
        slow = 4.0 if step == 0 else 0.0
        span("driver", "loop", "step", at, 9.0, step=step)
        span("driver", "loop", "train", at + 5, 3.5, samples=32)
        span("rollout[0]", "rollout[0]", "rollout.generate", at + 0.1, 2.0 + slow / 2)
        span("rollout[0]", "rollout[0]", "wait for devices", at + 0.2, 0.5)
        span("rollout[0]", "rollout[0]", "onload", at, 0.1)
        span("actor[0]", "actor[0]", "actor.train", at + 5, 3.0)
        span("actor[0]", "actor[0]", "offload", at + 8.5, 0.2)
    for process, records in lines.items():
        header = {"kind": "process", "process": process, "at_ns": 0}
        (run.trace_dir / f"{process}.jsonl").write_bytes(b"".join(encode_line(r) for r in [header, *records]))
    rollouts = run.path / "rollouts"
    rollouts.mkdir(exist_ok=True)
    samples = [{"sampled": [0, 1, 1]}, {"sampled": [0, 1, 1, 1]}]
    (rollouts / "rollout-0.jsonl").write_bytes(encode_line({"version": 1, "group": "g", "samples": samples}))
    return run


def test_a_trace_gives_a_point_for_each_step_but_the_first(run: Run) -> None:
    profile = profile_of_run(run, kind="gpu")
    rollout, actor = profile.workers["rollout"].options["gpu1"], profile.workers["actor"].options["gpu1"]
    assert rollout.seconds == pytest.approx((1.5, 1.5))
    assert rollout.items == (32.0, 32.0)
    assert rollout.onload_s == pytest.approx(0.1)
    assert actor.seconds == pytest.approx((3.0, 3.0))
    assert profile.workers["rollout"].lengths == (2.0, 3.0)
    assert profile.identity.model == "models/tiny"


def test_call_records_are_preferred(run: Run) -> None:
    records = [
        CallRecord(
            call=n, group="rollout", method="generate", rank=rank, start_s=0.0, end_s=4.0 + rank, wait_s=1.0,
            took=(Traffic(channel="prompts", items=16),), put=(Traffic(channel="answers", items=16),),
            turns=(Turn(device=rank, start_s=0.0, end_s=3.0),), onload_s=0.5,
        )
        for n in (1, 2) for rank in (0, 1)
    ]  # fmt: skip
    (run.path / "history.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))
    points = profile_of_run(run, kind="gpu").workers["rollout.generate"].options["gpu1"]
    assert (points.items, points.replicas, points.seconds) == ((16.0,), (2,), (3.5,))
    assert points.onload_s == 0.5


def test_calls_that_pass_nothing_are_no_workers() -> None:
    idle = CallRecord(call=1, group="actor", method="save", rank=0, start_s=0.0, end_s=1.0)
    assert workers_of_calls([idle], "gpu") == {}


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    run = Run.create("empty", root=tmp_path, config_toml="")
    with pytest.raises(PlanError, match="no step that could be measured"):
        profile_of_run(run)
    (run.path / "environment.json").write_text(json.dumps([]))
    with pytest.raises(PlanError, match="on what machine"):
        profile_of_run(run)
