"""What was measured of each worker, as a file: readable, editable, mergeable, and importable for hardware not at hand.

    [identity]
    model = "qwen2.5-7b"
    machine = "8 x H100-80GB"
    version = "0.1.0"                  # of rill
    source = "runs/demo"               # where the points come from

    [devices.gpu]
    memory_bytes = 8.0e10
    link_bytes_per_s = 5.0e10

    [workers.rollout]
    streams = true                     # gives each answer as it ends
    lengths = [212.0, 431.0, ...]      # of answers, sampled

    [workers.rollout.options.tp2]
    kind = "gpu"
    parallel = 2                       # devices to a replica
    items = [32.0, 64.0, 128.0]        # of one replica; these four columns are points
    replicas = [1, 1, 1]
    seconds = [10.1, 17.9, 34.0]
    memory_bytes = [3.1e10, 3.4e10, 4.0e10]
    onload_s = 1.5
    offload_s = 0.9

A profile belongs to a model, a machine and a version of rill. `check` refuses another one; with `is_other_ok` it
says in words what does not match, and the plan carries those words.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from rill.config.toml import dumps
from rill.errors import PlanError
from rill.planning.cost import Option, Pool, WorkerCost, fullest
from rill.planning.fit import Curve, constant, fit
from rill.planning.graph import Graph

Whole = Annotated[int, msgspec.Meta(ge=0)]
FromOne = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
FromZero = Annotated[float, msgspec.Meta(ge=0)]


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    model: str
    machine: str
    version: str
    source: str = ""
    workload: str = ""
    """Of a recipe: a digest of what its times depend on besides the model (engine, lengths, batch, trainer)."""


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    count: Whole = 0
    """Devices that it was measured with. 0: not known."""
    memory_bytes: Positive = float("inf")
    link_bytes_per_s: Positive = float("inf")
    local_bytes_per_s: Positive = float("inf")


class Points(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker on one kind of device at one parallel size. `items`, `replicas`, `seconds` and `memory_bytes` are
    columns of the same points; memory may be left out."""

    kind: str
    parallel: FromOne = 1
    items: tuple[Positive, ...]
    replicas: tuple[FromOne, ...]
    seconds: tuple[FromZero, ...]
    memory_bytes: tuple[FromZero, ...] = ()
    onload_s: FromZero = 0.0
    offload_s: FromZero = 0.0
    tail_s: FromZero = 0.0
    step_s: FromZero = 0.0
    sharded_bytes: FromZero = 0.0
    least: FromOne = 1
    """Fewest replicas that it is known to run on."""


class WorkerProfile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    options: dict[str, Points]
    lengths: tuple[Positive, ...] = ()
    streams: bool = False
    concurrency: Whole = 0
    rounds: FromOne = 1


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    identity: Identity
    workers: dict[str, WorkerProfile]
    devices: dict[str, DeviceKind] = {}
    switch_s: FromZero = 0.0
    """What it took to put all groups on other devices."""
    tried: dict[str, FromZero] = {}
    """Seconds of a step under plans that were run for some steps, by `Plan.signature`: better than any prediction."""
    graph: dict[str, Any] = {}
    """Of the workflow it was measured with, as `Graph.values` gives it. Empty: not known."""

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            profile = msgspec.convert(values, cls, strict=False)
            profile.traced_graph()
        except (OSError, ValueError, PlanError) as error:  # msgspec's and TOML's are ValueErrors
            raise PlanError(f"cannot read the profile {path}: {error}") from None
        for name, worker in profile.workers.items():
            if not worker.options:
                raise PlanError(f"{path}: {name} has no options: nothing was measured of it")
            for label, points in worker.options.items():
                _check_points(f"{path}: {name}.{label}", points)
        return profile

    def dumps(self) -> str:
        return dumps(_plain(msgspec.to_builtins(self)))

    def merge(self, other: Profile) -> Profile:
        """The points of both. They must be of the same model, machine and version."""
        for field in ("model", "machine", "version", "workload"):
            mine, its = getattr(self.identity, field), getattr(other.identity, field)
            if mine != its:
                raise PlanError(f"profiles of another {field} cannot be merged: {mine!r} and {its!r}")
        workers = dict(self.workers)
        for name, worker in other.workers.items():
            workers[name] = _merged_worker(workers[name], worker) if name in workers else worker
        sources = [s for s in (self.identity.source, other.identity.source) if s]
        identity = msgspec.structs.replace(self.identity, source=", ".join(dict.fromkeys(sources)))
        return Profile(
            identity=identity,
            workers=workers,
            devices={**self.devices, **other.devices},
            switch_s=max(self.switch_s, other.switch_s),
            tried={**self.tried, **other.tried},
            graph=self.graph or other.graph,
        )

    def check(self, wanted: Mapping[str, str], *, is_other_ok: bool = False) -> list[str]:
        """What of this profile is of another model, machine or version than `wanted` says. An error, or, where that is
        allowed, the differences in words."""
        differences = [
            f"the profile's {field} is {getattr(self.identity, field)!r}, this is {value!r}"
            for field, value in wanted.items()
            if getattr(self.identity, field) != value
        ]
        if differences and not is_other_ok:
            raise PlanError(
                f"{'; '.join(differences)}: measure again, or say --other-ok to plan with it all the same"
            )
        return differences

    def traced_graph(self) -> Graph | None:
        return Graph.from_values(self.graph, "the profile's graph") if self.graph else None

    def costs(self) -> dict[str, WorkerCost]:
        """Curves through the points, for the search."""
        return {name: _worker_cost(worker) for name, worker in self.workers.items()}

    def pools(self, counts: Mapping[str, int]) -> tuple[Pool, ...]:
        measured = {points.kind for worker in self.workers.values() for points in worker.options.values()}
        if unknown := sorted(counts.keys() - measured - self.devices.keys()):
            raise PlanError(
                f"no worker was measured on {', '.join(unknown)}: the profile knows {', '.join(sorted(measured))}"
            )
        return tuple(
            Pool(kind=kind, **msgspec.structs.asdict(self.devices.get(kind, DeviceKind())) | {"count": count})
            for kind, count in counts.items()
        )

    def kinds(self) -> list[str]:
        found = {p.kind: None for worker in self.workers.values() for p in worker.options.values()}
        return list(found)

    def basis(self) -> dict[str, str]:
        """For each worker, what its predicted times rest on."""
        return {
            name: "; ".join(_basis(label, points, worker.lengths) for label, points in worker.options.items())
            for name, worker in self.workers.items()
        }


def merge_all(profiles: Iterable[Profile]) -> Profile:
    first, *rest = profiles
    for other in rest:
        first = first.merge(other)
    return first


def shortened(lengths: Iterable[float], num: int = 64) -> tuple[float, ...]:
    """So many quantiles of a sample, the longest included: enough for a plan, few enough for a file."""
    sample = np.asarray(list(lengths), np.float64)
    if len(sample) <= num:
        return tuple(float(x) for x in np.sort(sample))
    return tuple(float(x) for x in np.quantile(sample, np.linspace(0.5 / num, 1.0, num)))


def _check_points(where: str, points: Points) -> None:
    columns = {len(points.items), len(points.replicas), len(points.seconds)}
    columns |= {len(points.memory_bytes)} if points.memory_bytes else set()
    if len(columns) != 1 or not points.items:
        raise PlanError(
            f"{where}: items, replicas, seconds and memory_bytes are columns of one length: got {columns}"
        )
    if not all(map(math.isfinite, (*points.items, *points.seconds, *points.memory_bytes))):
        raise PlanError(f"{where}: items, seconds and memory_bytes are finite numbers")


def _merged_worker(mine: WorkerProfile, its: WorkerProfile) -> WorkerProfile:
    options = dict(mine.options)
    for label, points in its.options.items():
        old = options.get(label)
        if old is None:
            options[label] = points
            continue
        if (old.kind, old.parallel) != (points.kind, points.parallel):
            raise PlanError(f"option {label} is {old.kind} × {old.parallel} in one profile, "
                            f"{points.kind} × {points.parallel} in the other: rename one")  # fmt: skip
        both_know_memory = bool(old.memory_bytes) and bool(points.memory_bytes)
        options[label] = msgspec.structs.replace(
            points,
            items=old.items + points.items,
            replicas=old.replicas + points.replicas,
            seconds=old.seconds + points.seconds,
            least=min(old.least, points.least),
            memory_bytes=old.memory_bytes + points.memory_bytes if both_know_memory else (),
        )
    lengths = shortened(mine.lengths + its.lengths)
    return msgspec.structs.replace(its, options=options, lengths=lengths)


def _worker_cost(worker: WorkerProfile) -> WorkerCost:
    return WorkerCost(
        options=tuple(_option(points, worker.lengths) for points in worker.options.values()),
        lengths=worker.lengths,
        streams=worker.streams,
        concurrency=worker.concurrency,
        rounds=worker.rounds,
    )


def _option(points: Points, lengths: tuple[float, ...]) -> Option:
    work, exponent, joined_s = _fit_time(points, lengths)
    return Option(
        kind=points.kind,
        parallel=points.parallel,
        work_s=work,
        replica_exponent=exponent,
        joined_s=joined_s,
        tail_s=points.tail_s,
        step_s=points.step_s,
        memory_bytes=fit(points.items, points.memory_bytes) if points.memory_bytes else constant(0.0),
        sharded_bytes=points.sharded_bytes,
        least=points.least,
        swap_s=points.onload_s + points.offload_s,
    )


def _fit_time(points: Points, lengths: tuple[float, ...]) -> tuple[Curve, float, float]:
    """Seconds by items, at the fewest replicas that were measured; how they grow with replicas; and what a call takes
    longer because there are several. What was measured is the fullest replica's time, which the cost model makes of the
    mean's: it is taken out. Each size counts once, with its median: chunks are measured far more often than batches."""
    mean_s = np.array(points.seconds) / fullest(lengths, np.array(points.items), np.array(points.replicas))
    measured: dict[tuple[float, int], list[float]] = defaultdict(list)
    for x, r, s in zip(points.items, points.replicas, mean_s):
        measured[x, r].append(s)
    rows = [(x, r, float(np.median(seconds))) for (x, r), seconds in measured.items()]
    fewest = min(points.replicas)
    base = [(x, s) for x, r, s in rows if r == fewest]
    curve = fit([x for x, _ in base], [s for _, s in base])
    more = np.array([(curve.at(x), r / fewest, max(s, 1e-12)) for x, r, s in rows if r > fewest])
    if not len(more):
        return curve, 0.0, 0.0
    alone_s, growth, real_s = more.T
    best = (math.inf, 0.0, 0.0)
    for exponent in np.linspace(0.0, 1.0, 101):
        left_s = real_s - alone_s * growth**exponent
        share = (1 - 1 / growth) / real_s
        joined_s = max(0.0, float(share @ (left_s / real_s) / (share @ share)))
        error = float(np.sum((left_s / real_s - joined_s * share) ** 2))
        best = min(best, (error, float(exponent), joined_s))
    _, exponent, joined_s = best
    return curve.scaled(fewest**-exponent), exponent, joined_s


def _basis(label: str, points: Points, lengths: tuple[float, ...]) -> str:
    curve, exponent, joined_s = _fit_time(points, lengths)
    growth = f", × replicas^{exponent:.2f}" if exponent else ""
    growth += f", + {joined_s:.2g} s for several" if joined_s else ""
    sizes = len(set(points.items))
    return (
        f"{label}: {len(points.items)} points at {sizes} size{'s' if sizes > 1 else ''} "
        f"({curve.smallest:g} to {curve.largest:g} items a replica), {curve.family}{growth}, "
        f"held-out error {curve.error:.0%}{' (one size: taken as proportional)' if sizes == 1 else ''}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner not in ((), [], {})}
    return value
