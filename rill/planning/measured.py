"""Profile points from what a run left behind: its call records where the runtime wrote them, its trace and figures
else.

From call records a point is one call: items that a rank took, seconds it was busy. From the trace a point is one
step: the
worker method that took the group's time, less its waits and swaps, and the step's samples over the group's ranks. Steps
of one run have one size; merge the profiles of runs with other batch sizes to get a curve.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from rill.errors import PlanError
from rill.planning.graph import CallRecord, read_history
from rill.planning.profile import Identity, Points, Profile, WorkerProfile, shortened
from rill.telemetry.chrome import Event, read_trace
from rill.telemetry.rollouts import read_rollouts
from rill.telemetry.run import Run

_NOT_WORK = {"wait for devices", "onload", "offload"}
_STREAMS = ("rollout", "env")
"""Groups whose items come out one by one. A profile's `streams` can be edited."""


def profile_of_run(run: Run, *, kind: str = "") -> Profile:
    """A profile from a run folder. `kind`: what its devices are called; unset: "cpu" or "gpu", by its torch."""
    start = _last_start(run)
    versions = start["versions"]
    kind = kind or ("cpu" if "+cpu" in versions.get("torch", "+cpu") else "gpu")
    calls = read_history(run.path)
    workers = workers_of_calls(calls, kind) if calls else _workers_of_trace(run, kind)
    lengths = shortened(_response_lengths(run))
    workers = {
        name: WorkerProfile(
            options=worker.options,
            streams=name.split(".")[0] in _STREAMS,
            lengths=lengths if name.split(".")[0] in _STREAMS else (),
        )
        for name, worker in workers.items()
    }
    if not workers:
        raise PlanError(f"{run.path} holds no step that could be measured: let it run for two steps or more")
    identity = Identity(
        model=_model_name(run), machine=machine_name(start), version=versions["rill"], source=str(run.path)
    )
    return Profile(identity=identity, workers=workers)


def workers_of_calls(calls: Iterable[CallRecord], kind: str) -> dict[str, WorkerProfile]:
    """A worker profile for each node. The first call of each is left out: it loads and compiles."""
    by_node: dict[str, dict[int, list[CallRecord]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if call.took or call.put:
            by_node[call.node][call.call].append(call)
    workers = {}
    for node, by_call in by_node.items():
        rows = []
        for number in sorted(by_call)[1:] or sorted(by_call):
            ranks = by_call[number]
            slowest = max(ranks, key=lambda c: c.busy_s)
            items = max((t.items for t in (slowest.took or slowest.put)), default=0)
            if items:
                rows.append((float(items), len(ranks), slowest.busy_s))
        swaps = [c for ranks in by_call.values() for c in ranks if c.turns]
        if rows:
            workers[node] = _worker(rows, kind, [c.onload_s for c in swaps], [c.offload_s for c in swaps])
    return workers


def machine_name(start: dict[str, Any]) -> str:
    """What figures depend on and environment.json knows: the architecture and the number of processors."""
    architecture = next(
        (a for a in ("x86_64", "aarch64", "arm64") if a in start["platform"]), start["platform"]
    )
    return f"{architecture}, {start['num_cpus']} cpus"


def _workers_of_trace(run: Run, kind: str) -> dict[str, WorkerProfile]:
    events = [event for event in read_trace(run.path) if event.kind == "span"]
    steps = sorted((e for e in events if e.lane == "loop" and e.name == "step"), key=lambda e: e.at_ns)
    by_lane: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.lane.endswith("]"):
            by_lane[event.lane].append(event)
    groups: dict[str, list[str]] = defaultdict(list)
    for lane in by_lane:
        groups[lane.split("[")[0]].append(lane)
    workers = {}
    for group, lanes in groups.items():
        rows = []
        for step in steps[1:] or steps:  # the first step loads and compiles
            items = _samples(step, events)
            busy_s = max(_busy_s(group, by_lane[lane], step) for lane in lanes)
            if items and busy_s > 0:
                rows.append((items / len(lanes), len(lanes), busy_s))
        inside = [event for lane in lanes for event in by_lane[lane]]
        swaps = [[e.duration_ns / 1e9 for e in inside if e.name == name] for name in ("onload", "offload")]
        held = any(event.name in ("onload", "offload") for event in inside)
        if rows and held:
            workers[group] = _worker(rows, kind, *swaps)
    return workers


def _worker(
    rows: list[tuple[float, int, float]], kind: str, onload_s: list[float], offload_s: list[float]
) -> WorkerProfile:
    items, replicas, seconds = zip(*rows)
    points = Points(
        kind=kind,
        items=items,
        replicas=replicas,
        seconds=seconds,
        onload_s=sum(onload_s) / max(1, len(onload_s)),
        offload_s=sum(offload_s) / max(1, len(offload_s)),
    )
    return WorkerProfile(options={f"{kind}1": points})


def _busy_s(group: str, spans: list[Event], step: Event) -> float:
    """Of a rank in a step: the seconds of the method that took most, without what it waited and swapped."""
    start, end = step.at_ns, step.at_ns + step.duration_ns
    inside = [e for e in spans if start <= e.at_ns and e.at_ns + e.duration_ns <= end]
    totals: dict[str, float] = defaultdict(float)
    for method in inside:
        if method.name.startswith(f"{group}."):
            idle_ns = sum(
                e.duration_ns
                for e in inside
                if e.name in _NOT_WORK and method.at_ns <= e.at_ns < method.at_ns + method.duration_ns
            )
            totals[method.name] += (method.duration_ns - idle_ns) / 1e9
    return max(totals.values(), default=0.0)


def _samples(step: Event, events: list[Event]) -> int:
    for event in events:
        is_inside = step.at_ns <= event.at_ns <= step.at_ns + step.duration_ns
        if is_inside and event.lane == "loop" and "samples" in event.attributes:
            return int(event.attributes["samples"])
    return 0


def _response_lengths(run: Run) -> Iterator[float]:
    for group in read_rollouts(run):
        for sample in group["samples"]:
            if sampled := sum(sample.get("sampled", ())):
                yield float(sampled)


def _last_start(run: Run) -> dict[str, Any]:
    try:
        starts = json.loads((run.path / "environment.json").read_text(encoding="utf-8"))
        start: dict[str, Any] = starts[-1]
    except (OSError, ValueError, IndexError) as error:
        raise PlanError(
            f"{run.path} does not say on what machine it ran (environment.json): {error}"
        ) from None
    return start


def _model_name(run: Run) -> str:
    model = tomllib.loads(run.config_path.read_text(encoding="utf-8")).get("model", {})
    if path := model.get("path"):
        return str(path)
    shape = model.get("shape", {})
    return f"{shape.get('model_type', 'model')} {shape.get('num_hidden_layers')}x{shape.get('hidden_size')}"
