"""A recipe and its plan: what the search may decide for a recipe, and what a plan writes into it.

A plan is carried out by recipe values alone, `placement.*`, `flow.edges` and `cluster.colocate` (who stays in memory
beside whom), so the run's own config.toml says what it did and a resumed run needs no plan. What the recipe, or the
command line, sets itself is pinned: the search works around it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rill import __version__
from rill.config.base import value_at
from rill.config.resolve import DEFAULT, source_of
from rill.config.toml import dumps, key_lines
from rill.errors import PlanError
from rill.planning.cost import Problem, WorkerCost
from rill.planning.fit import constant
from rill.planning.graph import ARROW
from rill.planning.plan import Plan, parse_ids
from rill.planning.profile import DeviceKind, Identity, Profile
from rill.planning.search import Found
from rill.planning.simulator import simulate
from rill.planning.traced import STREAMS, graph_of, profiled_workers, read_history, room_of
from rill.runtime.device.device import Device, local_devices, number
from rill.runtime.device.placement import resolve
from rill.telemetry.run import Run, write_atomically

PLAN_TOML, PROFILE_TOML, PLAN_JSON = "plan.toml", "profile.toml", "plan.json"
FOLDED = {"env": "rollout"}
"""Environment processes go where the engines are: a plan does not place them."""
PARALLEL = {
    "rollout": ("rollout.engine.tensor_parallel_size",),
    "actor": ("trainer.tensor_parallel", "trainer.context_parallel"),
    "critic": ("critic.tensor_parallel", "critic.context_parallel"),
    "reward": ("reward_model.tensor_parallel",),
}
"""What says how many devices make a replica of a group."""
FULL_BYTES = 1.0
"""Of a device whose memory was not measured: one worker fills it, so that those who share it take turns."""


USABLE = 0.9
"""Of a device's memory: the rest is lost between blocks, or taken when answers grow."""
STAYS_BYTES = 0.001
"""Of one that the recipe keeps in memory beside others: any number of those, and nobody else."""

Recipe = Any
"""rill.workflows.config.OnlineConfig, which is above this room."""


# --- what a profile belongs to ----------------------------------------------------------------------------


def identity_of(config: Recipe, num_devices: int, source: str) -> Identity:
    """Of the recipe on this machine."""
    threads = config.cluster.threads_on(num_devices)
    machine = f"{platform.machine()}, {os.cpu_count()} cpus, {threads} threads a worker"
    return Identity(
        model=config.model_name,
        machine=machine,
        version=__version__,
        source=source,
        workload=workload_of(config),
    )


def workload_of(config: Recipe) -> str:
    """A digest of what times depend on: all of the recipe but where, how long and under what seed it runs."""
    values = config.model_dump(mode="json")
    for key in (
        "placement",
        "flow",
        "seed",
        "sinks",
        "eval",
        "workflow",
        "loader",
        "sync",
        config.warm_up_table,
    ):
        values.pop(key, None)
    loop, cluster = values.pop("loop"), values.pop("cluster")
    values["prompts"], values["cluster"] = loop["prompts_per_step"], [cluster["type"], cluster["colocate"]]
    text = json.dumps(_without_seeds(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_seeds(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_seeds(value) for key, value in values.items() if key != "seed"}
    return values


def devices_of(config: Recipe) -> tuple[Device, ...]:
    """The devices of this machine that the recipe uses."""
    if config.cluster.type != "local":
        raise PlanError(
            f"the recipe runs on {config.cluster.type}, whose devices are not known before it starts: make a plan with "
            "rill plan RECIPE --profile FILE --devices N --out plan.toml, and train with --plan plan.toml"
        )
    return number(local_devices(config.cluster.devices or "auto"))


def devices_each(config: Recipe) -> dict[str, int]:
    """Devices to a replica, of the groups that the recipe may place; most have one."""
    values = config.model_dump()
    return {
        group: math.prod(value_at(values, key) or 1 for key in PARALLEL.get(group, ()))
        for group, placed in config.placement
        if placed is not None
    }


def seats_text(group: str, devices: str, parallel: int) -> str:
    """A group's placement: a rank on each device, but an engine is one rank on all devices of a replica."""
    num_engines = len(parse_ids(devices)) // parallel
    if parallel == 1 or group not in STREAMS:
        return devices
    return f"{devices}:0-{num_engines - 1}" if num_engines > 1 else f"{devices}:0"


def devices_on_paper(counts: Mapping[str, int]) -> tuple[Device, ...]:
    return number([Device(kind=kind, index=n) for kind, count in counts.items() for n in range(count)])


def profile_of(run: Run, config: Recipe, devices: Sequence[Device]) -> Profile:
    """From a run of the recipe, with the graph as it was traced."""
    records = read_history(run.path)
    if not records:
        raise PlanError(f"{run.path} has no history.jsonl: let it take a step or more")
    kind = devices[0].kind
    graph = graph_of(records, batch=config.loop.prompts_per_step, folded=FOLDED)
    workers = profiled_workers(run, records, kind=kind, folded=FOLDED, parallel=devices_each(config))
    return Profile(
        identity=identity_of(config, len(devices), str(run.path)),
        workers={node.name: workers[node.name] for node in graph.nodes if node.name in workers},
        devices={kind: DeviceKind(memory_bytes=USABLE * room)} if (room := room_of(records)) else {},
        graph=graph.values(),
    )


# --- what may be decided ----------------------------------------------------------------------------------


def problem_of(
    config: Recipe, provenance: Mapping[str, str], profile: Profile, devices: Sequence[Device]
) -> Problem:
    """All plans that the recipe leaves open, for these devices."""
    if (graph := profile.traced_graph()) is None:
        raise PlanError("the profile does not say who passes what to whom (its [graph]): measure the recipe")
    if not devices:
        raise PlanError("a plan needs at least one device: got none (give --devices 1 or more)")
    batch = config.loop.prompts_per_step
    costs, pools = (
        _as_the_recipe_cuts(profile.costs(), devices_each(config)),
        profile.pools(Counter(device.kind for device in devices)),
    )
    staying = config.together if config.cluster.colocate else ()
    points = [p for w in profile.workers.values() for p in w.options.values()]
    has_memory = any(p.memory_bytes or p.sharded_bytes for p in points)
    if staying or not has_memory:
        pools = tuple(replace(pool, memory_bytes=FULL_BYTES) for pool in pools)
        used = {name: constant(STAYS_BYTES if name in staying else FULL_BYTES) for name in costs}
        costs = {
            name: replace(
                cost,
                options=tuple(replace(o, memory_bytes=used[name], sharded_bytes=0.0) for o in cost.options),
            )
            for name, cost in costs.items()
        }
    return Problem(
        graph=replace(graph, batch=batch).collapsed(),
        workers=costs,
        pools=pools,
        chunks=chunks_of(config),
        min_chunk=_smallest_measured(costs),
        lag=config.loop.max_lag,
        pins={
            name: tuple(d.id for seat in resolve(placed, devices) for d in seat.devices)
            for name in costs
            if (placed := pinned_placement(config, provenance, name)) is not None
        },
    )


def _as_the_recipe_cuts(costs: Mapping[str, WorkerCost], each: Mapping[str, int]) -> dict[str, WorkerCost]:
    """Only the parallel sizes that the recipe has."""
    kept = {}
    for name, cost in costs.items():
        wanted = each.get(name, 1)
        options = tuple(option for option in cost.options if option.parallel == wanted)
        if not options:
            sizes = sorted({option.parallel for option in cost.options})
            keys = ", ".join(PARALLEL.get(name, ()))
            raise PlanError(
                f"a replica of {name} has {wanted} devices in the recipe ({keys}), the profile knows {sizes}: "
                "measure the recipe, or change it"
            )
        kept[name] = replace(cost, options=options)
    return kept


def pinned_placement(config: Recipe, provenance: Mapping[str, str], group: str) -> str | None:
    """Where the recipe itself puts a group; None: it leaves that open."""
    placed: str | None = getattr(config.placement, group, None)
    return placed if source_of(f"placement.{group}", provenance) != DEFAULT else None


def _smallest_measured(costs: Mapping[str, WorkerCost]) -> int:
    """Items of a chunk below which some stage's cost would be a guess."""
    sizes = [max(o.work_s.smallest * o.least for o in c.options) for c in costs.values() if not c.streams]
    return math.ceil(max(sizes, default=1))


def chunks_of(config: Recipe) -> tuple[int, ...]:
    """Sizes of chunks that a plan may have. Unset: all. What needs a whole batch before it begins gains nothing."""
    batch: int = config.loop.prompts_per_step
    if chunk := config.flow.granularity:  # the recipe's own: a plan writes edges
        return (batch, chunk) if batch % chunk == 0 else (batch,)
    if config.needs_whole_batch:
        return (batch,)
    return ()


# --- what a plan writes -----------------------------------------------------------------------------------


def values_of(plan: Plan) -> dict[str, Any]:
    """The recipe values that carry a plan out, by dotted key."""
    placement = {f"placement.{name}": devices for name, devices in placement_of(plan).items()}
    return {**placement, "flow.edges": edges_of(plan), "cluster.colocate": list(plan.staying)}


def placement_of(plan: Plan) -> dict[str, str]:
    return {name: seats_text(name, placed.devices, placed.parallel) for name, placed in plan.workers.items()}


def edges_of(plan: Plan) -> dict[str, int]:
    """Prompts to a chunk, by the group that consumes them; a whole batch is not said."""
    edges: dict[str, int] = {}
    for arrow, chunk in plan.edges.items():
        target = arrow.partition(ARROW)[2]
        edges[target] = min(chunk, edges.get(target, chunk))
    return {name: chunk for name, chunk in edges.items() if chunk < plan.batch}


def put_into(values: dict[str, Any], provenance: dict[str, str], plan: Plan, source: str) -> list[str]:
    """Write a plan into a recipe's values, before they are resolved; what the recipe says itself stays, in words."""
    kept = []
    for key, value in values_of(plan).items():
        table, name = key.split(".")
        given = provenance.get(key) or next(
            (provenance[k] for k in provenance if key == "flow.edges" and k.startswith("flow.")), None
        )
        if given is not None:
            kept.append(f"{key} is the recipe's own ({given})")
            continue
        values.setdefault(table, {})[name] = value
        provenance[key] = source
    return kept


def rewrite_config(path: Path, plan: Plan, source: str) -> None:
    """Write a plan into a run's config.toml, so that a resumed run goes on with it."""
    text = path.read_text(encoding="utf-8")
    lines, values = text.split("\n"), tomllib.loads(text)
    comments = {key: lines[n - 1].rpartition("# ")[2] for key, n in key_lines(text).items()}
    for key, value in values_of(plan).items():
        table, name = key.split(".")
        values.setdefault(table, {})[name] = value
        comments[key] = source
    write_atomically(path, dumps(values, comments))


def check_follows(plan: Plan, config: Recipe) -> None:
    """That a plan from a file is one for this recipe and, as far as that is known, for these devices."""
    known = type(config.placement).model_fields
    if unknown := [name for name in plan.workers if name not in known]:
        raise PlanError(
            f"the plan places {', '.join(unknown)}; the recipe's groups are {', '.join(known)}: it is another recipe's"
        )
    there = len(devices_of(config)) if config.cluster.type == "local" else sum(plan.devices.values())
    if sum(plan.devices.values()) > there:
        raise PlanError(
            f"the plan is for {sum(plan.devices.values())} devices, there are {there}: make one for these "
            f"(rill plan RECIPE), or set cluster.devices = {sum(plan.devices.values())}"
        )
    each = devices_each(config)
    for what, mine, its in (
        *((f"devices to a replica of {n}", each.get(n, 1), p.parallel) for n, p in plan.workers.items()),
        ("prompts a step", config.loop.prompts_per_step, plan.batch),
        ("versions of lag", config.loop.max_lag, plan.lag),
    ):
        if mine != its:
            raise PlanError(f"the plan is for {its} {what}, the recipe has {mine}: make another plan")


def leave_in(
    folder: Path, plan: Plan, *, problem: Problem | None = None, found: Found | None = None,
    profile: Profile | None = None, why: Sequence[str] = (),
) -> None:  # fmt: skip
    """The plan's files of a run folder: the plan, what it rests on, and what the dashboard shows of it."""
    write_atomically(folder / PLAN_TOML, plan.dumps())
    if profile is not None:
        write_atomically(folder / PROFILE_TOML, profile.dumps())
    shown: dict[str, Any] = {
        "chosen": f"{plan.mode}: {plan.structure}",
        "why": [*why, *(f"{n} rests on {p.basis}" for n, p in plan.workers.items() if p.basis), *plan.notes],
    }
    if plan.step_s:
        shown["predicted_step_s"] = plan.step_s
    shown["alternatives"] = [{"name": mode, "why": reason} for mode, reason in plan.rejected.items()]
    if problem is not None and found is not None:
        shown["lanes"] = predicted_lanes(problem, found, plan)
    write_atomically(folder / PLAN_JSON, msgspec.json.encode(shown).decode())


def predicted_lanes(problem: Problem, found: Found, plan: Plan) -> list[dict[str, Any]]:
    """A predicted step, lane by lane as the timeline names them: the second, once the pipeline is filled."""
    done = simulate(problem, found.tree, steps=2)
    begin_s = done.step_s[0]
    members = {node.name: node.members or (node.name,) for node in problem.graph.nodes}
    return [
        {
            "lane": f"device {device}",
            "name": worker,
            "start_s": round(span.start_s - begin_s, 6),
            "end_s": round(span.end_s - begin_s, 6),
        }
        for span in done.spans
        if span.step == 1
        for worker in members[span.node]
        for device in plan.workers[worker].ids
    ]


def words(plan: Plan) -> list[str]:
    """Why this plan, for the terminal."""
    lines = [f"plan           {plan.mode}: {plan.structure}"]
    for name, placed in plan.workers.items():
        shares = f", shared with {', '.join(placed.shares_with)}" if placed.shares_with else ""
        chunk = f", {placed.chunk} prompts at a time" if placed.chunk < plan.batch else ""
        lines.append(f"  {name:<12} devices {placed.devices}{shares}{chunk}, {placed.seconds:.3g} s a step")
    if plan.step_s:
        lines.append(f"  predicted    {plan.step_s:.3g} s a step (± {plan.spread:.0%})")
    lines += [f"  not {mode}: {reason}" for mode, reason in plan.rejected.items()]
    return lines + [f"  mind: {note}" for note in plan.notes]
