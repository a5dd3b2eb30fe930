"""The graph, what groups did in a step, and points come out of the runtime's own call records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from rill.errors import PlanError
from rill.planning.traced import (
    StepTimes,
    busy_s,
    flow_of,
    graph_of,
    profiled_workers,
    read_history,
    room_of,
    whole_calls,
    work_of_step,
    write_history,
)
from rill.runtime.hub.history import CallRecord, Flowed, TurnRecord
from rill.telemetry.jsonl import encode_line
from rill.telemetry.run import Run

S = 1_000_000_000


def call(
    node: str, took: str = "", put: str = "", *, rank: int = 0, at: float = 0.0, lasts: float = 2.0, items: int = 8,
    **more: object,
) -> CallRecord:  # fmt: skip
    group, method = node.split(".")
    return CallRecord(
        group=group, method=method, rank=rank, started_s=at, ended_s=at + lasts,
        took={name: Flowed(items, items * 10, float(items)) for name in took.split()},
        put={name: Flowed(items, items * 100, float(items)) for name in put.split()},
        turns=[TurnRecord([rank], at, at + lasts)], **more,
    )  # fmt: skip


def grpo_step(at: float, *, ranks: int = 1, items: int = 8) -> list[CallRecord]:
    """A step of 9 s: 4 s of sampling, 3 s of training of which 1 s waited for samples, 0.5 s of weights."""
    calls = [call("controller.select", put="tasks", at=at, items=items * ranks)]
    for rank in range(ranks):
        calls += [
            call("rollout.generate", "tasks", "samples outcomes", at=at, lasts=4.0, rank=rank, items=items),
            call("actor.train", "samples", at=at + 4, lasts=3.0, rank=rank, waits_s={"channel:samples": 1.0}),
        ]
    return [*calls, call("actor.publish", at=at + 8, lasts=0.5)]


def test_who_takes_what_another_put_is_fed_by_it_and_the_controller_is_no_worker() -> None:
    graph = graph_of([*grpo_step(0.0), *grpo_step(10.0)], batch=8)
    assert [node.name for node in graph.nodes] == ["rollout", "actor"]
    assert [(e.source, e.target, e.bytes_per_item) for e in graph.edges] == [("rollout", "actor", 100.0)]
    assert [(s.source, s.target) for s in graph.syncs] == [("actor", "rollout")]


def test_environments_beside_the_engines_are_a_cycle_or_a_part_of_them() -> None:
    calls = [
        call("env.run", "tasks answers", "requests samples"),
        call("rollout.serve", "requests", "answers"),
        call("actor.train", "samples"),
    ]
    circle = graph_of(calls, batch=8).collapsed()
    assert [node.name for node in circle.nodes] == ["env+rollout", "actor"]
    folded = graph_of(calls, batch=8, folded={"env": "rollout"})
    assert [(e.source, e.target) for e in folded.edges] == [("rollout", "actor")]


def test_a_call_that_was_told_in_parts_is_one() -> None:
    parts = [
        call("actor.train", "samples", at=0.0, lasts=5.0, is_whole=False, waits_s={"channel:samples": 1.0}),
        call("actor.train", at=5.0, lasts=1.0, waits_s={"channel:samples": 0.5}),
    ]
    (whole,) = whole_calls(parts)
    assert (whole.started_s, whole.ended_s, whole.took["samples"].items) == (0.0, 6.0, 8)
    assert busy_s(whole) == 4.5


def test_a_step_says_what_each_group_worked_on_its_slowest_rank() -> None:
    calls = [*grpo_step(0.0), *grpo_step(10.0, ranks=2)]
    worked = work_of_step(whole_calls(calls), StepTimes(began_s=10.0, ended_s=19.0))
    assert (worked["rollout"].ranks, worked["rollout"].busy_s, worked["rollout"].items) == (2, 4.0, 16)
    assert worked["actor"].busy_s == 2.5  # 2 s of work and the weights
    assert "controller" not in worked


def written(run: Run, num_steps: int, seconds: float = 1.5, scored_s: Sequence[float] = ()) -> None:
    """The trace of such steps: a chunk took `seconds` of the actor's two; it scores in chunks of 4 groups before."""
    lines: dict[str, list[dict[str, object]]] = {"driver": [], "actor[0]": []}
    for step in range(num_steps):
        at = step * 10 * S
        lines["driver"].append(
            {"kind": "span", "name": "step", "lane": "loop", "at_ns": at, "duration_ns": 9 * S}
        )
        lines["actor[0]"] += [
            {"kind": "span", "name": "chunk", "lane": "actor[0]", "at_ns": at + (3 + n) * S,
             "duration_ns": int(each_s * S), "attributes": {"of": "actor.score", "chunk": f"{step}.{n}", "groups": 4}}
            for n, each_s in enumerate(scored_s)
        ]  # fmt: skip
        chunk = {"of": "actor.train", "chunk": f"{step}.0", "groups": 8}
        lines["actor[0]"].append(
            {"kind": "span", "name": "chunk", "lane": "actor[0]", "at_ns": at + 5 * S,
             "duration_ns": int((seconds + 0.25) * S), "attributes": chunk}
        )  # fmt: skip
        lines["actor[0]"].append(
            {"kind": "span", "name": "onload", "lane": "actor[0]", "at_ns": at + 5 * S, "duration_ns": S // 4}
        )
    for process, records in lines.items():
        header = {"kind": "process", "process": process, "at_ns": 0}
        (run.trace_dir / f"{process}.jsonl").write_bytes(b"".join(encode_line(r) for r in [header, *records]))


def test_points_are_steps_of_engines_and_chunks_of_stages(tmp_path: Path) -> None:
    run = Run.create("small", root=tmp_path)
    written(run, 3)
    workers = profiled_workers(run, [c for n in range(3) for c in grpo_step(10.0 * n)], kind="gpu")
    rollout, actor = workers["rollout"].options["gpu1"], workers["actor"].options["gpu1"]
    assert (rollout.items, rollout.seconds) == ((8.0, 8.0), (4.0, 4.0))  # the first step warms up
    assert actor.seconds == pytest.approx((1.5, 1.5))
    assert actor.step_s == pytest.approx(1.0)  # 2.5 s of work less the chunk
    assert workers["rollout"].streams and not workers["actor"].streams


def test_spans_of_a_version_that_wrote_others_are_passed_over(tmp_path: Path) -> None:
    run = Run.create("old", root=tmp_path)
    written(run, 3)
    path = run.trace_dir / "actor[0].jsonl"
    old = {"kind": "span", "name": "chunk", "lane": "actor[0]", "at_ns": 15 * S, "duration_ns": S}
    damaged = [{**old, "at_ns": "soon"}, {**old, "attributes": 3}, {"kind": "process", "at_ns": 0}]
    path.write_bytes(path.read_bytes() + b"".join(encode_line(record) for record in [old, *damaged]))
    workers = profiled_workers(run, [c for n in range(3) for c in grpo_step(10.0 * n)], kind="gpu")
    assert workers["actor"].options["gpu1"].seconds == pytest.approx((1.5, 1.5))


def test_a_group_that_the_batch_passes_twice_needs_the_seconds_of_both(tmp_path: Path) -> None:
    run = Run.create("small", root=tmp_path)
    written(run, 2, scored_s=(0.2, 0.3))
    workers = profiled_workers(run, [c for n in range(2) for c in grpo_step(10.0 * n)], kind="gpu")
    actor = workers["actor"].options["gpu1"]
    assert actor.items == (4.0, 4.0) and actor.seconds == pytest.approx((0.2 + 0.75, 0.3 + 0.75))
    assert actor.step_s == pytest.approx(0.5)


def test_memory_is_what_a_group_held_at_the_end_of_its_turns_where_that_is_known(tmp_path: Path) -> None:
    run = Run.create("small", root=tmp_path)
    written(run, 3)
    held = {"rollout": (60, 100), "actor": (30, 90)}  # bytes of its own, and with what was free
    records = [
        msgspec.structs.replace(
            c, turns=[TurnRecord(t.devices, t.started_s, t.ended_s, *held.get(c.group, (0, 0))) for t in c.turns]
        )
        for n in range(3)
        for c in grpo_step(10.0 * n)
    ]  # fmt: skip
    workers = profiled_workers(run, records, kind="gpu")
    assert {name: set(w.options["gpu1"].memory_bytes) for name, w in workers.items()} == {
        "rollout": {60.0},
        "actor": {30.0},
    }
    assert room_of(records) == 100.0, "of the one that had most beside it"
    assert room_of(grpo_step(0.0)) == 0.0


def test_a_run_folder_keeps_the_history_and_what_the_dashboard_draws(tmp_path: Path) -> None:
    run = Run.create("kept", root=tmp_path)
    records = [*grpo_step(0.0), *grpo_step(10.0)]
    write_history(run, records)
    assert read_history(run.path) == records
    flow = json.loads((run.path / "flow.json").read_text())
    assert flow == flow_of(records)
    assert flow["bottleneck"] == "rollout"
    assert [(e["from"], e["to"], e["channel"]) for e in flow["edges"]] == [("rollout", "actor", "samples")]
    assert 0 < flow["edges"][0]["depth"] <= 64, "items that waited for the actor, on average"
    (run.path / "history.jsonl").write_text('{"call": "one"}\n')
    with pytest.raises(PlanError, match="no call records"):
        read_history(run.path)


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    run = Run.create("empty", root=tmp_path)
    with pytest.raises(PlanError, match="no step that could be measured"):
        profiled_workers(run, [], kind="cpu")
