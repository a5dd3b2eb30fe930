"""What a stage costs: seconds and memory of a worker on n devices, for a chunk of a step's items.

A `Problem` is everything the search and the simulator know: the graph, a `WorkerCost` for each worker, the devices.

A chunk of b items on r replicas gives each replica ⌈b/r⌉ items and takes

    work(⌈b/r⌉) · r^e  +  tail_s · E[longest of b]  +  step_s · b/M        (M: the step's items)

work is measured on items of mean length; tail_s is what one more unit of the longest item costs when everything else is
done (a decoding step of a nearly empty engine), so more devices do not shorten it. A worker that streams (an engine with
all prompts in flight) gives its first chunk when the b shortest answers are done and its last when all are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from rill.errors import PlanError
from rill.planning.fit import Curve, constant
from rill.planning.frontier import DEVICES, Floats, Frontier, Ints, Op, Source
from rill.planning.graph import Graph, Node

MEMORY_STEPS = 16
"""Memory is counted in sixteenths of a device, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices of one kind."""

    kind: str
    count: int
    memory_bytes: float = math.inf
    link_bytes_per_s: float = math.inf
    """Between two devices, over the slowest wire that a plan may use."""
    local_bytes_per_s: float = math.inf
    """Within a device: weights that change hands between workers which share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a worker: on this kind of device, with this many devices to a replica."""

    kind: str
    work_s: Curve
    """Seconds of a call, by items of one replica."""
    parallel: int = 1
    replica_exponent: float = 0.0
    """Growth of the time with the number of replicas, at the same items for each: r^e."""
    tail_s: float = 0.0
    step_s: float = 0.0
    """Once a step, however it is cut: the optimizer."""
    memory_bytes: Curve = constant(0.0)
    """A device's, by items that a replica holds at once."""
    sharded_bytes: float = 0.0
    """Divided over all devices of the worker: FSDP's weights, gradients and moments."""
    swap_s: float = 0.0
    """Offload and onload together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCost:
    options: tuple[Option, ...]
    lengths: tuple[float, ...] = ()
    """Measured lengths of items (tokens of an answer, steps of an episode)."""
    streams: bool = False
    concurrency: int = 0
    """Items that a replica works on at once; 0: all it is given."""
    rounds: int = 1
    """In a cycle: how often an item goes round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What a person has decided already."""

    devices: int | None = None
    ids: tuple[int, ...] = ()
    kind: str | None = None
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker of a stage: which of its options, and how many replicas."""

    worker: str
    option: int
    kind: str
    parallel: int
    replicas: int

    @property
    def devices(self) -> int:
        return self.parallel * self.replicas


@dataclass(frozen=True)
class Stage:
    """A node at one chunk size: the frontier's rows and, in the same order, what each stands for."""

    frontier: Frontier
    choices: tuple[tuple[Seat, ...], ...]
    is_apart: tuple[bool, ...]
    """Of a collapsed cycle: whether its members have devices of their own."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    graph: Graph
    """Without cycles: see Graph.collapsed."""
    workers: Mapping[str, WorkerCost]
    """By node, or by member of a collapsed cycle."""
    pools: tuple[Pool, ...]
    chunks: tuple[int, ...] = ()
    """Sizes that a step's items may be cut into, from the whole batch down; unset: halves, to a 64th."""
    min_chunk: int = 1
    lag: int = 0
    """Steps that generation may be ahead of training."""
    pins: Mapping[str, Pin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.pools or sum(pool.count for pool in self.pools) < 1:
            raise PlanError("a plan needs at least one device: got none (give --devices 1 or more)")
        needed = {m for node in self.graph.nodes for m in (node.members or (node.name,))}
        if missing := sorted(needed - self.workers.keys()):
            raise PlanError(f"no profile of {', '.join(missing)}: measured are {', '.join(sorted(self.workers))}")
        if unknown := sorted(self.pins.keys() - needed):
            raise PlanError(f"pinned {', '.join(unknown)}: the workers are {', '.join(sorted(needed))}")
        if self.lag < 0:
            raise PlanError(f"lag is {self.lag}: 0 is synchronous, 1 is one step ahead")
        for chunk in self.chunks:
            if chunk < 1 or self.graph.batch % chunk:
                raise PlanError(f"chunks of {chunk} do not divide the batch of {self.graph.batch}")

    @property
    def num_devices(self) -> int:
        return sum(pool.count for pool in self.pools)

    @cached_property
    def limits(self) -> Ints:
        return np.array([pool.count for pool in self.pools], np.int64)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Chunk sizes, the whole batch first."""
        if self.chunks:
            return tuple(sorted({self.graph.batch, *self.chunks}, reverse=True))
        batch = self.graph.batch
        divisors = [d for d in range(1, batch + 1) if batch % d == 0 and d >= min(self.min_chunk, batch)]
        wanted = [max((d for d in divisors if d <= batch / k), default=0) for k in (1, 2, 4, 8, 16, 32, 64)]
        return tuple(sorted({d for d in wanted if d}, reverse=True))

    @cached_property
    def link_bytes_per_s(self) -> float:
        return min(pool.link_bytes_per_s for pool in self.pools)

    @cached_property
    def local_bytes_per_s(self) -> float:
        return min(pool.local_bytes_per_s for pool in self.pools)

    def stage(self, index: int, chunk: int) -> Stage:
        """All ways to run a node at a chunk size that no other way beats."""
        node = self.graph.nodes[index]
        tables = [self._rows(member, chunk, bool(node.members)) for member in node.members or (node.name,)]
        return _one_worker(self, tables[0]) if len(tables) == 1 else _cycle(self, node, tables)

    def _rows(self, worker: str, chunk: int, is_member: bool) -> _Rows:
        cost, pin = self.workers[worker], self.pins.get(worker, Pin())
        batch = self.graph.batch
        pieces = []
        for number, option in enumerate(cost.options):
            pool = next((i for i, pool in enumerate(self.pools) if pool.kind == option.kind), None)
            if pool is None or (pin.kind or option.kind) != option.kind:
                continue
            if (pin.parallel or option.parallel) != option.parallel:
                continue
            most = self.pools[pool].count // option.parallel
            replicas = np.arange(1, most + 1)
            count = pin.devices or len(pin.ids)
            if count:
                replicas = replicas[replicas * option.parallel == count]
            held = self.pools[pool]
            pieces.append(_rows_of(worker, cost, number, pool, held, replicas, chunk, batch, is_member))
        return _Rows.union(worker, pieces)


# --- time and memory of one worker ------------------------------------------------------------------------


class Lengths:
    """What is asked of measured lengths: the expected longest of b, the length that a share of them stays under."""

    def __init__(self, samples: Sequence[float]) -> None:
        self.sorted = np.sort(np.asarray(samples, np.float64))
        self.mean = float(self.sorted.mean())

    def longest_of(self, num: float) -> float:
        """E[max of num draws] = Σ x_j (F_j^num − F_{j−1}^num)."""
        cumulated = np.arange(1, len(self.sorted) + 1) / len(self.sorted)
        powers = cumulated**num
        return float(np.sum(self.sorted * np.diff(powers, prepend=0.0)))

    def shortest_share(self, share: float) -> float:
        return float(np.quantile(self.sorted, min(1.0, max(0.0, share))))

    def work_until(self, length: float) -> float:
        """Of all the work of items worked on side by side, the share that is done when `length` has been reached."""
        return float(np.minimum(self.sorted, length).mean() / self.mean) if self.mean else 1.0


@cache
def lengths_of(samples: tuple[float, ...]) -> Lengths:
    return Lengths(samples)


def longest(cost: WorkerCost, num: float) -> float:
    return lengths_of(cost.lengths).longest_of(num) if cost.lengths else 0.0


def work_seconds(option: Option, items: Floats | Ints, replicas: Floats | Ints) -> Floats:
    growth: Floats = np.power(np.asarray(replicas, np.float64), option.replica_exponent)
    return option.work_s(np.asarray(items, np.float64)) * growth


def call_seconds(
    cost: WorkerCost, option: Option, chunk: int, batch: int, replicas: Ints
) -> tuple[Floats, Floats]:
    """Latency and interval of a chunk, by replicas."""
    if not (cost.streams and chunk < batch):
        items = -(-chunk // replicas)
        seconds = work_seconds(option, items, replicas) + option.step_s * chunk / batch
        seconds = seconds + option.tail_s * _steps(cost, items, chunk)
        return seconds, seconds
    items = -(-batch // replicas)
    work = work_seconds(option, items, replicas)
    whole = work + option.tail_s * _steps(cost, items, batch) + option.step_s
    first = whole * (chunk / batch)
    if cost.lengths:
        waves = np.maximum(1.0, items / cost.concurrency) if cost.concurrency else np.ones(len(items))
        share = np.minimum(1.0, waves * chunk / batch)
        lengths = lengths_of(cost.lengths)
        reached = np.quantile(lengths.sorted, share)
        done = np.array([lengths.work_until(length) for length in np.unique(reached)])
        done = done[np.searchsorted(np.unique(reached), reached)]
        in_first_wave = option.tail_s * reached + work / waves * done
        first = np.minimum(whole, np.where(waves * chunk <= batch, in_first_wave, first))
    return first, (whole - first) / (batch / chunk - 1)


def _steps(cost: WorkerCost, items: Ints, total: int) -> Floats:
    """Length units that pass before all are done: the longest, or what bounded concurrency makes of the sum."""
    if not cost.lengths:
        return np.zeros(len(items))
    steps = np.full(len(items), longest(cost, total))
    if cost.concurrency:
        steps = np.maximum(steps, items * lengths_of(cost.lengths).mean / cost.concurrency)
    return steps


def memory_share(
    cost: WorkerCost, option: Option, pool: Pool, chunk: int, batch: int, replicas: Ints
) -> Floats:
    held = -(-(batch if cost.streams else chunk) // replicas)
    if cost.concurrency:
        held = np.minimum(held, cost.concurrency)
    used = option.memory_bytes(held.astype(np.float64)) + option.sharded_bytes / (replicas * option.parallel)
    result: Floats = np.maximum(0.0, np.ceil(used / pool.memory_bytes * MEMORY_STEPS - 1e-9)) / MEMORY_STEPS
    return result


# --- rows of a stage --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """A worker's choices at one chunk size, by devices; those that do not fit are left out."""

    worker: str
    pool: Ints
    devices: Ints
    latency: Floats
    interval: Floats
    memory: Floats
    swap: Floats
    option: Ints
    replicas: Ints
    half: Floats
    """Both halves of the chunk, one after the other."""

    @classmethod
    def union(cls, worker: str, pieces: Sequence[_Rows]) -> _Rows:
        names = ("pool", "devices", "latency", "interval", "memory", "swap", "option", "replicas", "half")
        if not pieces:
            return cls(worker, *(np.zeros(0, np.int64) for _ in names))
        return cls(worker, *(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))

    def seat(self, row: int, problem: Problem) -> Seat:
        option = problem.workers[self.worker].options[self.option[row]]
        return Seat(self.worker, int(self.option[row]), option.kind, option.parallel, int(self.replicas[row]))


def _rows_of(
    worker: str, cost: WorkerCost, number: int, pool_index: int, pool: Pool, replicas: Ints, chunk: int, batch: int,
    is_member: bool,
) -> _Rows:  # fmt: skip
    option = cost.options[number]
    latency, interval = call_seconds(cost, option, chunk, batch, replicas)
    half = 2 * call_seconds(cost, option, -(-chunk // 2), batch, replicas)[0] if is_member else latency
    memory = memory_share(cost, option, pool, chunk, batch, replicas)
    fits = memory <= 1.0
    replicas, latency, interval, memory, half = (c[fits] for c in (replicas, latency, interval, memory, half))
    # More devices must buy something: time or memory.
    is_new = np.zeros(len(replicas), np.bool_)
    for column in (latency, interval, memory, half):
        lowest = np.minimum.accumulate(column) if len(column) else column
        is_new |= np.concatenate([np.ones(min(1, len(column)), np.bool_), column[1:] < lowest[:-1]])
    replicas, latency, interval, memory, half = (c[is_new] for c in (replicas, latency, interval, memory, half))
    same = np.ones(len(replicas), np.int64)
    return _Rows(
        worker, same * pool_index, replicas * option.parallel, latency, interval, memory,
        np.full(len(replicas), option.swap_s), same * number, replicas, half,
    )  # fmt: skip


def _one_worker(problem: Problem, rows: _Rows) -> Stage:
    devices = np.zeros((len(rows.pool), len(problem.pools)))
    devices[np.arange(len(rows.pool)), rows.pool] = rows.devices
    best = _best_rows(rows.latency, rows.interval, rows.memory, rows.swap, devices)
    choices = tuple((rows.seat(int(row), problem),) for row in best.left)
    return Stage(Frontier.of(best.table, Source(Op.STAGE)), choices, (False,) * len(choices))


def _cycle(problem: Problem, node: Node, tables: Sequence[_Rows]) -> Stage:
    """A collapsed cycle. Together: its members alternate on the same devices, all in memory. Apart: each has its own
    devices and the items go round in two halves, so that the slower member is always busy."""
    grids = np.meshgrid(*(np.arange(len(table.pool)) for table in tables), indexing="ij")
    picked = np.stack([grid.reshape(-1) for grid in grids], axis=1)
    pool, count, whole, half, memory, swap = (
        np.stack([getattr(t, name)[picked[:, i]] for i, t in enumerate(tables)], axis=1)
        for name in ("pool", "devices", "latency", "half", "memory", "swap")
    )
    kinds = np.arange(len(problem.pools))
    held = np.where(pool[:, :, None] == kinds, count[:, :, None], 0)
    rounds = max(problem.workers[member].rounds for member in node.members)
    slowest = half.max(axis=1)
    apart_s = np.minimum(whole.sum(axis=1), slowest + (half.sum(axis=1) - slowest) / (2 * rounds))
    can_share = (pool == pool[:, :1]).all(axis=1) & (memory.sum(axis=1) <= 1.0)
    can_part = (held.sum(axis=1) <= problem.limits).all(axis=1)
    possible = np.flatnonzero(np.concatenate([can_share, can_part]))
    seconds = np.concatenate([whole.sum(axis=1), apart_s])[possible]
    best = _best_rows(
        seconds,
        seconds,
        np.concatenate([memory.sum(axis=1), memory.max(axis=1)])[possible],
        np.concatenate([swap.sum(axis=1), swap.max(axis=1)])[possible],
        np.concatenate([held.max(axis=1), held.sum(axis=1)])[possible],
    )
    rows = possible[best.left]
    seats = tuple(
        tuple(t.seat(int(r), problem) for t, r in zip(tables, picked[row % len(picked)])) for row in rows
    )
    is_apart = tuple(bool(row >= len(picked)) for row in rows)
    return Stage(Frontier.of(best.table, Source(Op.STAGE)), seats, is_apart)


def _best_rows(
    latency: Floats, interval: Floats, memory: Floats, swap: Floats, devices: Floats | Ints
) -> Frontier:
    columns = np.stack([latency, interval, memory, swap, np.zeros(len(latency))], axis=1)
    assert columns.shape[1] == DEVICES
    return Frontier.of(np.concatenate([columns, devices], axis=1), Source(Op.STAGE)).best()


# --- why a stage has no way at all ------------------------------------------------------------------------


def why_no_stage(problem: Problem, node: Node) -> str:
    """Which constraint keeps a node off the devices, and the smallest change that would work."""
    for worker in node.members or (node.name,):
        cost, pin = problem.workers[worker], problem.pins.get(worker, Pin())
        kinds = {pool.kind: pool for pool in problem.pools}
        options = [o for o in cost.options if o.kind in kinds]
        if not options:
            measured = ", ".join(sorted({o.kind for o in cost.options}))
            return f"{worker} was measured on {measured}; the devices are {', '.join(kinds)}: profile it there"
        options = [o for o in options if (pin.kind or o.kind) == o.kind and (pin.parallel or o.parallel) == o.parallel]
        if not options:
            sizes = sorted({o.parallel for o in cost.options})
            return f"{worker} is pinned to what no profile has (kind {pin.kind}, parallel {pin.parallel}): measured are sizes {sizes}"
        smallest = min(options, key=lambda o: o.parallel)
        available = kinds[smallest.kind].count
        if available < smallest.parallel:
            return f"{worker} needs {smallest.parallel} {smallest.kind} devices to a replica, there are {available}: add {smallest.parallel - available}"
        count = pin.devices or len(pin.ids)
        if count and not any(count % o.parallel == 0 and count <= kinds[o.kind].count for o in options):
            return f"{worker} is pinned to {count} devices: it needs a multiple of {smallest.parallel}, at most {available}"
        if text := _why_no_memory(problem, worker, cost, options, kinds, count):
            return text
    return f"{node.name}: its workers do not fit on the devices side by side: add devices"


def _why_no_memory(
    problem: Problem, worker: str, cost: WorkerCost, options: Sequence[Option], kinds: Mapping[str, Pool], count: int
) -> str:  # fmt: skip
    batch, chunk = problem.graph.batch, problem.levels[-1]
    best = None
    for option in options:
        pool = kinds[option.kind]
        most = (count or pool.count) // option.parallel
        if most:
            share = float(memory_share(cost, option, pool, chunk, batch, np.array([most]))[0])
            if best is None or share < best[0]:
                best = (share, option, pool, most)
    if best is None or best[0] <= 1.0:
        return ""
    share, option, pool, most = best
    text = (
        f"{worker} does not fit: it needs {share * pool.memory_bytes / 2**30:.1f} GiB of a {pool.kind} device, which has "
        f"{pool.memory_bytes / 2**30:.1f} GiB, on {most * option.parallel} devices"
    )
    more = most + np.arange(1, 16 * most + 1)
    enough = more[memory_share(cost, option, pool, chunk, batch, more) <= 1.0]
    if len(enough):
        return f"{text}: {int(enough[0]) * option.parallel} devices would do"
    return f"{text}: more devices do not help, a larger parallel size or a smaller model does"
