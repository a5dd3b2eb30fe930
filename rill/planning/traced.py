"""What a run's history says of its workflow: the graph, what each group did in a step, and points of a profile.

The history is the runtime's own (`cluster.history()`, one `CallRecord` for each call of a worker method); a run folder
keeps its last records as `history.jsonl`. Nobody declares anything: who takes from a channel that another has filled
is fed by it.

A step's items are prompts. An engine's point is a step: all prompts of it, seconds in which it held its devices. A
stage's point is a chunk, from the span that edges leave in the trace; what is left of its calls, and the time in
which weights travel, comes once a step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rill.errors import PlanError
from rill.planning.graph import Edge, Graph, Node, Sync
from rill.planning.profile import Points, WorkerProfile, shortened
from rill.runtime.hub.history import CallRecord, Flowed
from rill.telemetry.chrome import Event, read_trace
from rill.telemetry.jsonl import encode_line, read_lines
from rill.telemetry.rollouts import each_group
from rill.telemetry.run import Run, write_atomically

HISTORY_FILE, FLOW_FILE = "history.jsonl", "flow.json"
STREAMS = ("rollout", "env")
"""Groups whose items come out one by one. A profile's `streams` can be edited."""
CHUNK = "chunk"
"""The span that an edge leaves for every chunk (rill.workers.edges)."""
PUBLISH = "publish"
MAX_KEPT = 4000
"""Records that a run folder keeps: the newest."""

_ADMIT = ("controller", "driver")
"""Groups that hand out work and do none."""
_OF_CHUNK = {"of", "chunk", "groups"}
"""Attributes without which a chunk's span says nothing: other versions of rill wrote such."""
_NOT_WORK = ("wait for devices", "onload", "offload")


# --- the run folder's files -------------------------------------------------------------------------------


def write_history(run: Run, records: Sequence[CallRecord]) -> None:
    """`history.jsonl`, and `flow.json` for the dashboard."""
    kept = records[-MAX_KEPT:]
    lines = b"".join(encode_line(msgspec.to_builtins(record)) for record in kept)
    write_atomically(run.path / HISTORY_FILE, lines.decode())
    if flow := flow_of(kept):
        write_atomically(run.path / FLOW_FILE, msgspec.json.encode(flow).decode())


def read_history(run_dir: Path | str) -> list[CallRecord]:
    """The calls of a run folder; records of a version of rill that wrote others are an error, not skipped."""
    path = Path(run_dir) / HISTORY_FILE
    try:
        return [msgspec.convert(line, CallRecord) for line in read_lines(path)]
    except msgspec.ValidationError as error:
        raise PlanError(f"{path} holds no call records of this version of rill: {error}") from None


def flow_of(records: Sequence[CallRecord]) -> dict[str, Any]:
    """What the dashboard's Flow page draws; empty where nothing has flowed."""
    calls = [call for call in whole_calls(records) if call.group not in _ADMIT and (call.took or call.put)]
    if not calls:
        return {}
    seconds = max(c.ended_s for c in calls) - min(c.started_s for c in calls)
    graph = graph_of(records, batch=1)
    nodes = []
    for node in graph.nodes:
        mine = [call for call in calls if call.group == node.name]
        ranks = len({call.rank for call in mine})
        nodes.append(
            {
                "id": node.name,
                "devices": ",".join(map(str, node.devices)),
                "items_per_s": sum(max((f.items for f in c.took.values()), default=0) for c in mine)
                / seconds,
                "busy": min(1.0, sum(busy_s(call) for call in mine) / (seconds * ranks)),
            }
        )
    edges = []
    for channel, (sources, targets) in _channels(calls).items():
        total = sum(flowed.items for flows in sources.values() for flowed in flows)
        edges += [
            {"from": s, "to": t, "channel": channel, "items_per_s": total / seconds, "depth": _waiting(calls, channel)}
            for s in sources for t in targets
        ]  # fmt: skip
    bottleneck = max(nodes, key=lambda node: float(str(node["busy"])))["id"] if nodes else ""
    return {"nodes": nodes, "edges": edges, "bottleneck": bottleneck}


def _waiting(calls: Sequence[CallRecord], channel: str) -> float:
    """Items that lay in a channel, averaged over time: what was put less what was taken, each evenly over its call."""
    slopes: list[tuple[float, float]] = []
    for call in calls:
        items = call.put.get(channel, Flowed()).items - call.took.get(channel, Flowed()).items
        rate = items / max(call.ended_s - call.started_s, 1e-9)
        slopes += [(call.started_s, rate), (call.ended_s, -rate)]
    depth = rate = area = 0.0
    slopes.sort()
    for (at_s, change), (until_s, _) in zip(slopes, slopes[1:]):
        rate += change
        after = max(0.0, depth + rate * (until_s - at_s))
        area += (depth + after) / 2 * (until_s - at_s)
        depth = after
    return area / max(slopes[-1][0] - slopes[0][0], 1e-9)


# --- calls ------------------------------------------------------------------------------------------------


def whole_calls(records: Iterable[CallRecord]) -> list[CallRecord]:
    """Calls that lasted were told in parts: each as one record. One that goes on is as long as it is known."""
    found: list[CallRecord] = []
    open_parts: dict[tuple[str, int, str], CallRecord] = {}
    for record in records:
        key = (record.group, record.rank, record.method)
        known = open_parts.pop(key, None)
        whole = record if known is None else _joined(known, record)
        if record.is_whole:
            found.append(whole)
        else:
            open_parts[key] = whole
    return sorted([*found, *open_parts.values()], key=lambda call: call.started_s)


def _joined(one: CallRecord, other: CallRecord) -> CallRecord:
    return msgspec.structs.replace(
        one,
        ended_s=other.ended_s,
        is_whole=other.is_whole,
        took=_sums(one.took, other.took),
        put=_sums(one.put, other.put),
        turns=[*one.turns, *other.turns],
        onload_s=one.onload_s + other.onload_s,
        offload_s=one.offload_s + other.offload_s,
        waits_s={
            on: one.waits_s.get(on, 0.0) + other.waits_s.get(on, 0.0) for on in {*one.waits_s, *other.waits_s}
        },
    )


def _sums(one: Mapping[str, Flowed], other: Mapping[str, Flowed]) -> dict[str, Flowed]:
    none = Flowed()
    pairs = {name: (one.get(name, none), other.get(name, none)) for name in {**one, **other}}
    return {
        name: Flowed(a.items + b.items, a.num_bytes + b.num_bytes, a.weight + b.weight)
        for name, (a, b) in pairs.items()
    }


def busy_s(call: CallRecord) -> float:
    """Seconds in which the rank worked: without what it waited for and swapped. An engine works on many items at once
    and waits for more meanwhile: it is busy while it has its devices."""
    lasted_s = call.ended_s - call.started_s
    if call.method == PUBLISH:
        return lasted_s
    if call.group in STREAMS:
        held_s = sum(turn.ended_s - turn.started_s for turn in call.turns)
        return max(0.0, held_s - call.onload_s) if call.turns else lasted_s
    return max(0.0, lasted_s - call.onload_s - sum(call.waits_s.values()))


# --- the graph --------------------------------------------------------------------------------------------


def graph_of(records: Sequence[CallRecord], *, batch: int, folded: Mapping[str, str] | None = None) -> Graph:
    """Who took what from channels that whom had filled. `batch`: items of a step. `folded`: groups that count as a part
    of another one, which they are no plan's business apart from."""
    calls = [call for call in whole_calls(_renamed(records, folded or {})) if call.group not in _ADMIT]
    held: dict[str, set[int]] = {}
    for call in calls:
        if call.took:
            held.setdefault(call.group, set()).update(d for turn in call.turns for d in turn.devices)
    num_steps = max(1, _num_items(calls) // max(1, batch))
    edges: dict[tuple[str, str], float] = {}
    for sources, targets in _channels(calls).values():
        for source, flows in sources.items():
            size = sum(flowed.num_bytes for flowed in flows) / (num_steps * batch)
            for target in targets:
                if source in held and source != target:
                    edges[source, target] = edges.get((source, target), 0.0) + size
    trains = next((c.group for c in calls if c.method == PUBLISH and c.group in held), None)
    syncs = [Sync(source=trains, target=name) for name in held if name == STREAMS[0] and trains]
    return Graph(
        nodes=tuple(Node(name=name, devices=tuple(sorted(ids))) for name, ids in held.items()),
        edges=tuple(Edge(source=s, target=t, bytes_per_item=size) for (s, t), size in edges.items()),
        syncs=tuple(syncs),
        batch=batch,
    )


def _channels(calls: Sequence[CallRecord]) -> dict[str, tuple[dict[str, list[Flowed]], dict[str, None]]]:
    """Of each channel that workers both fill and empty: what each put, and who takes."""
    found: dict[str, tuple[dict[str, list[Flowed]], dict[str, None]]] = {}
    for call in calls:
        for name, flowed in call.put.items():
            found.setdefault(name, ({}, {}))[0].setdefault(call.group, []).append(flowed)
        for name in call.took:
            found.setdefault(name, ({}, {}))[1][call.group] = None
    return {name: sides for name, sides in found.items() if all(sides)}


def _num_items(calls: Sequence[CallRecord]) -> int:
    """Taken by groups at the beginning, from channels that none of them fills."""
    filled = {name for call in calls for name in call.put}
    return sum(
        flowed.items
        for call in calls
        if call.group in STREAMS
        for name, flowed in call.took.items()
        if name not in filled
    )


def _renamed(records: Iterable[CallRecord], folded: Mapping[str, str]) -> list[CallRecord]:
    """Ranks below 0 are those of a folded group."""
    return [
        msgspec.structs.replace(r, group=folded[r.group], rank=-1 - r.rank) if r.group in folded else r
        for r in records
    ]


# --- steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step of the loop."""

    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What a group did in a step."""

    ranks: int
    busy_s: float
    """Of its slowest rank."""
    items: int
    """Of the whole step, over all groups."""
    onload_s: float
    held_bytes: int
    """Of a device's memory, at most. 0: not known."""


def work_of_step(
    calls: Sequence[CallRecord], step: StepTimes, folded: Mapping[str, str] | None = None
) -> dict[str, Worked]:
    """By group; `calls` are whole."""
    inside = [
        call
        for call in _renamed(calls, folded or {})
        if step.began_s <= (call.started_s + call.ended_s) / 2 <= step.ended_s
        and call.group not in _ADMIT
        and (call.took or call.method == PUBLISH)
    ]
    items = _num_items(inside)
    by_rank: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for call in inside:
        by_rank[call.group][call.rank] += busy_s(call)
    return {
        group: Worked(
            ranks=sum(rank >= 0 for rank in ranks),
            busy_s=max(ranks.values()),
            items=items,
            onload_s=max((c.onload_s for c in inside if c.group == group), default=0.0),
            held_bytes=max((t.held_bytes for c in inside if c.group == group for t in c.turns), default=0),
        )
        for group, ranks in by_rank.items()
    }


def steps_of(events: Iterable[Event]) -> list[StepTimes]:
    """As the loop's spans in the trace say."""
    found = [
        StepTimes(began_s=e.at_ns / 1e9, ended_s=(e.at_ns + e.duration_ns) / 1e9)
        for e in events
        if e.kind == "span" and e.lane == "loop" and e.name == "step"
    ]
    return sorted(found, key=lambda step: step.began_s)


def profiled_workers(
    run: Run,
    records: Sequence[CallRecord],
    *,
    kind: str,
    folded: Mapping[str, str] | None = None,
    parallel: Mapping[str, int] | None = None,
) -> dict[str, WorkerProfile]:
    """Points of every group. The first step on other devices is left out: it loads and compiles. `parallel`: devices to
    a replica, where they are several; an engine is one rank on all of them, a trainer has a rank on each."""
    events = list(read_trace(run.path))
    calls = whole_calls(records)
    measured = [(step, work_of_step(calls, step, folded)) for step in steps_of(events)]
    offload = defaultdict(list)
    for call in calls:
        if call.offload_s:
            offload[call.group].append(call.offload_s)
    lengths = shortened(_group_lengths(run))
    workers = {}
    for group in {group: None for _, worked in measured for group in worked}:
        each = (parallel or {}).get(group, 1)
        mine = [e for e in events if e.lane.startswith(f"{group}[")]
        rows, once = _rows(group, measured, mine, 1 if group in STREAMS else each)
        if not rows:
            continue
        onloads = [worked[group].onload_s for _, worked in measured if group in worked]
        items, replicas, seconds, held = zip(*rows)
        points = Points(
            kind=kind,
            parallel=each,
            items=items,
            replicas=replicas,
            seconds=seconds,
            memory_bytes=held if all(held) else (),
            onload_s=statistics.median(onloads),
            offload_s=statistics.median(offload[group]) if offload[group] else 0.0,
            step_s=once,
            least=min(replicas),
        )
        streams = group in STREAMS
        workers[group] = WorkerProfile(
            options={f"{kind}{each}": points}, streams=streams, lengths=lengths if streams else ()
        )
    if not workers:
        raise PlanError(f"{run.path} holds no step that could be measured: let it run for two steps or more")
    return workers


def room_of(records: Sequence[CallRecord]) -> float:
    """Bytes of a device that the groups have among themselves: without contexts of processes, and simulators. 0: not
    known. Whoever had most was alone with what never leaves."""
    return float(max((turn.room_bytes for record in records for turn in record.turns), default=0))


def _rows(
    group: str,
    measured: Sequence[tuple[StepTimes, Mapping[str, Worked]]],
    events: Sequence[Event],
    ranks_each: int,
) -> tuple[list[tuple[float, int, float, float]], float]:
    """Points of a group (items of a replica, replicas, seconds, bytes), and the seconds that come once a step."""
    rows, once = [], []
    seen: set[int] = set()
    for step, worked in measured:
        mine = worked.get(group)
        if mine is None or not mine.items or not mine.ranks:
            continue
        replicas = max(1, mine.ranks // ranks_each)
        if replicas not in seen and len(measured) > 1:
            seen.add(replicas)
            continue
        if group in STREAMS:
            rows.append((mine.items / replicas, replicas, mine.busy_s, float(mine.held_bytes)))
            continue
        chunks = _chunks(step, events)
        held = float(mine.held_bytes)
        rows += [(items / replicas, replicas, seconds, held) for items, seconds in chunks]
        once.append(mine.busy_s - sum(seconds for _, seconds in chunks))
    return rows, max(0.0, statistics.median(once)) if once else 0.0


def _chunks(step: StepTimes, events: Sequence[Event]) -> list[tuple[int, float]]:
    """Groups and seconds of each chunk of a step, on the rank that needed longest, without waits and swaps. Where the
    batch passes a group twice (PPO's actor: scored, then trained on), a chunk has its share of both."""
    inside = [e for e in events if step.began_s <= e.at_ns / 1e9 <= step.ended_s]
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for span in (e for e in inside if e.name == CHUNK and e.attributes.keys() >= _OF_CHUNK):
        idle_ns = sum(
            e.duration_ns
            for e in inside
            if e.lane == span.lane
            and e.name in _NOT_WORK
            and span.at_ns <= e.at_ns < span.at_ns + span.duration_ns
        )
        key = (str(span.attributes["of"]), str(span.attributes["chunk"]))
        seconds = max(0, span.duration_ns - idle_ns) / 1e9  # spans of waits may lie in one another
        if key not in found or seconds > found[key][1]:
            found[key] = (int(span.attributes["groups"]), seconds)
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for (line, _), chunk in found.items():
        lines[line].append(chunk)
    finest = max(lines, key=lambda line: len(lines[line]), default="")
    num_groups = sum(groups for groups, _ in lines[finest])
    others_s = sum(seconds for line, chunks in lines.items() if line != finest for _, seconds in chunks)
    return [(groups, seconds + others_s * groups / num_groups) for groups, seconds in lines[finest]]


def _group_lengths(run: Run) -> list[float]:
    """Sampled tokens of the longest answer of each group: a group is whole when that ends."""
    return [
        float(longest)
        for group in each_group(run)
        if (longest := max((sum(sample.sampled) for sample in group.samples), default=0))
    ]
