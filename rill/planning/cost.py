"""What a stage costs: seconds and memory of a worker on n devices, for a chunk of a step's items.

A `Problem` is everything the search and the simulator know: the graph, a `WorkerCost` for each worker, the devices.

A chunk of b items on r replicas gives each replica ⌈b/r⌉ items and takes

    work(⌈b/r⌉) · r^e  +  joined_s · (1 − 1/r)  +  tail_s · E[longest of b]  +  step_s · b/M      (M: the step's items)

work is measured on items of mean length; joined_s is what replicas take to agree (gradients go round a ring), however
few the items; tail_s is what one more unit of the longest item costs when everything else is done (a decoding step of a
nearly empty engine), so more devices do not shorten it. A worker that streams (an engine with all prompts in flight)
gives its first chunk when the b shortest answers are done and its last when all are: `call_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rill.errors import PlanError
from rill.planning.fit import Curve, constant
from rill.planning.frontier import DEVICES, Floats, Frontier, Ints, Op, Source
from rill.planning.graph import Graph, Node

PACES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
"""Rates at which the consumer of a stream may take from it, relative to the stream's mean: see `call_seconds`."""

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
    joined_s: float = 0.0
    """Of a call, times 1 − 1/r: what r replicas take besides their work."""
    tail_s: float = 0.0
    step_s: float = 0.0
    """Once a step, however it is cut: the optimizer."""
    memory_bytes: Curve = constant(0.0)
    """A device's, by items that a replica holds at once."""
    sharded_bytes: float = 0.0
    """Divided over all devices of the worker: FSDP's weights, gradients and moments."""
    swap_s: float = 0.0
    """Offload and onload together."""
    least: int = 1
    """Fewest replicas that it is known to run on."""


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

    @property
    def at_once(self) -> float:
        return self.concurrency or math.inf

    def __post_init__(self) -> None:
        ways = [(option.kind, option.parallel) for option in self.options]
        if len(set(ways)) < len(ways):
            raise PlanError(
                f"a worker has two options of one kind and parallel size: {ways}: merge their points"
            )


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
    pins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The devices that a person has chosen for a worker."""

    def __post_init__(self) -> None:
        if not self.pools or sum(pool.count for pool in self.pools) < 1:
            raise PlanError("a plan needs at least one device: got none (give --devices 1 or more)")
        needed = {m for node in self.graph.nodes for m in (node.members or (node.name,))}
        if missing := sorted(needed - self.workers.keys()):
            raise PlanError(
                f"no profile of {', '.join(missing)}: measured are {', '.join(sorted(self.workers))}"
            )
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
    def paces(self) -> tuple[float, ...]:
        """Ahead of training, a stream's own mean is the least interval that lasts."""
        return PACES if self.lag == 0 else tuple(pace for pace in PACES if pace >= 1.0)

    @cached_property
    def link_bytes_per_s(self) -> float:
        return min(pool.link_bytes_per_s for pool in self.pools)

    @cached_property
    def local_bytes_per_s(self) -> float:
        return min(pool.local_bytes_per_s for pool in self.pools)

    def stage(self, index: int, chunk: int) -> Stage:
        """All ways to run a node at a chunk size that no other way beats."""
        node = self.graph.nodes[index]
        if not node.members:
            return _one_worker(self, node.name, self._rows(node.name, chunk))
        return _cycle(self, node, [self._rows(member, chunk, is_member=True) for member in node.members])

    def _rows(self, worker: str, chunk: int, *, is_member: bool = False) -> _Rows:
        """A worker's ways at one chunk size, by devices."""
        cost, batch = self.workers[worker], self.graph.batch
        num_pinned = len(self.pins.get(worker, ()))
        pieces = [np.zeros(0, _ROW)]
        for number, option in enumerate(cost.options):
            pool = next((i for i, pool in enumerate(self.pools) if pool.kind == option.kind), None)
            if pool is None:
                continue
            most = self.pools[pool].count // option.parallel
            replicas = np.arange(option.least, most + 1)
            if num_pinned:
                replicas = replicas[replicas * option.parallel == num_pinned]
            if is_stream(cost, chunk, batch):
                times = stream_seconds(cost, option, chunk, batch, replicas, self.paces)
            else:
                times = [call_seconds(cost, option, chunk, batch, replicas)]
            half = call_seconds(cost, option, -(-chunk // 2), batch, replicas)[0] if is_member else None
            memory = memory_share(cost, option, self.pools[pool], chunk, batch, replicas)
            for latency, interval in times:
                halves = latency if half is None else 2 * half
                kept = _worth_it(memory, latency, interval, halves)
                rows = np.zeros(len(kept), _ROW)
                rows["pool"], rows["option"], rows["swap"] = pool, number, option.swap_s
                rows["replicas"], rows["devices"] = replicas[kept], replicas[kept] * option.parallel
                rows["latency"], rows["interval"] = latency[kept], interval[kept]
                rows["memory"], rows["halves"] = memory[kept], halves[kept]
                pieces.append(rows)
        return np.concatenate(pieces)


# --- time and memory of one worker ------------------------------------------------------------------------


class Lengths:
    """What is asked of measured lengths: the expected longest of b, the length that a share of them stays under."""

    def __init__(self, samples: Sequence[float]) -> None:
        self.sorted = np.sort(np.asarray(samples, np.float64))
        self.mean = float(self.sorted.mean())
        self.variation = float(self.sorted.std() / self.mean) if self.mean else 0.0
        self._quantiles: dict[int, tuple[Floats, Floats]] = {}

    def longest_of(self, num: float) -> float:
        """E[max of num draws] = Σ x_j (F_j^num − F_{j−1}^num)."""
        cumulated = np.arange(1, len(self.sorted) + 1) / len(self.sorted)
        powers = cumulated**num
        return float(np.sum(self.sorted * np.diff(powers, prepend=0.0)))

    def quantiles(self, num: int) -> tuple[Floats, Floats]:
        """Of num draws: as many quantiles as are needed, the last being the expected longest, and at each the share of
        all work that is done when it has been reached."""
        if num not in self._quantiles:
            count = min(512, max(64, len(self.sorted)))
            levels = np.quantile(self.sorted, (np.arange(count) + 0.5) / count)
            levels[-1] = max(levels[-1], self.longest_of(num))
            self._quantiles[num] = levels, np.array([self.work_until(x) for x in levels])
        return self._quantiles[num]

    def work_until(self, length: float) -> float:
        """Of all the work of items worked on side by side, the share that is done when `length` has been reached."""
        return float(np.minimum(self.sorted, length).mean() / self.mean) if self.mean else 1.0


@cache
def lengths_of(samples: tuple[float, ...]) -> Lengths:
    return Lengths(samples)


def longest(cost: WorkerCost, num: float) -> float:
    return lengths_of(cost.lengths).longest_of(num) if cost.lengths else 0.0


def work_seconds(option: Option, items: Floats | Ints, replicas: Floats | Ints) -> Floats:
    count = np.asarray(replicas, np.float64)
    growth: Floats = np.power(count, option.replica_exponent)
    return option.work_s(np.asarray(items, np.float64)) * growth + option.joined_s * (1 - 1 / count)


def call_seconds(
    cost: WorkerCost, option: Option, chunk: int, batch: int, replicas: Ints, pace: float = 1.0
) -> tuple[Floats, Floats]:
    """Latency and interval of a chunk, by replicas.

    A stream's chunks do not come evenly: short answers come first and the longest, which are also the most work for
    whoever takes them, come last. With A_c the end of chunk c and W_c what is left from c on, in mean chunks of work, a
    consumer with interval x is done at max_c(A_c + x·W_c). The two figures that say the same for x = i are

        i = pace · A_k / k          f = max_c(A_c − i · (k − W_c))

    and for any other x they say no less. So a stream has a pair for each of several paces, and the search takes
    the one that fits its consumer best.
    """
    if not is_stream(cost, chunk, batch):
        items = -(-chunk // replicas)
        seconds = _fullest_s(cost, option, items, replicas) + option.step_s * chunk / batch
        seconds = seconds + option.tail_s * _steps(cost, items, chunk)
        return seconds, seconds
    return stream_seconds(cost, option, chunk, batch, replicas, (pace,))[0]


def stream_seconds(
    cost: WorkerCost, option: Option, chunk: int, batch: int, replicas: Ints, paces: Sequence[float]
) -> list[tuple[Floats, Floats]]:
    """The same of a stream, for each pace."""
    items = -(-batch // replicas)
    work = _fullest_s(cost, option, items, replicas)
    lengths = lengths_of(cost.lengths) if cost.lengths else None
    loads, which = np.unique(np.stack([items, work], axis=1), axis=0, return_inverse=True)
    pairs = np.zeros((len(paces), 2, len(loads)))
    for number, (x, seconds) in enumerate(loads):
        ends, left = _arrivals(cost, option, lengths, float(x), float(seconds), chunk, batch)
        intervals = np.array(paces) * ends[-1] / len(ends)
        pairs[:, 0, number] = np.max(ends - intervals[:, None] * (len(ends) - left), axis=1)
        pairs[:, 1, number] = intervals
    which = which.reshape(-1)
    return [(latency[which], interval[which]) for latency, interval in pairs]


def is_stream(cost: WorkerCost, chunk: int, batch: int) -> bool:
    """Whether a worker gives parts of a batch that it has whole in flight."""
    return cost.streams and chunk < batch


def _arrivals(
    cost: WorkerCost, option: Option, lengths: Lengths | None, items: float, work_s: float, chunk: int, batch: int
) -> tuple[Floats, Floats]:  # fmt: skip
    """A_c and W_c of every chunk, from the lengths' quantiles; waves where not all items are worked on at once."""
    k = batch // chunk
    if lengths is None:
        return (work_s + option.step_s) * np.arange(1, k + 1) / k, np.arange(k, 0, -1).astype(np.float64)
    quantiles, done = lengths.quantiles(batch)
    waves = max(1.0, items / cost.at_once)
    before = np.minimum(np.arange(math.ceil(waves)), waves - 1)
    weight = np.minimum(1.0, waves - np.arange(math.ceil(waves)))
    ends = (before[:, None] + done) * (work_s / waves) + option.tail_s * (
        before[:, None] * lengths.mean + quantiles
    )
    order = np.argsort(ends, axis=None, kind="stable")
    ends = ends.reshape(-1)[order]
    weights = np.repeat(weight, len(quantiles))[order]
    tokens = (weight[:, None] * quantiles).reshape(-1)[order]
    shares, work_shares = np.cumsum(weights) / weights.sum(), np.cumsum(tokens) / tokens.sum()
    at = np.minimum(np.searchsorted(shares, np.arange(1, k + 1) / k - 1e-9), len(ends) - 1)
    left = k * (1 - np.concatenate([[0.0], work_shares[at[:-1]]]))
    arrived = ends[at]
    arrived[-1] = ends[-1] + option.step_s
    return arrived, left


def _fullest_s(cost: WorkerCost, option: Option, items: Ints, replicas: Ints) -> Floats:
    """Work of the replica that has got the most."""
    return work_seconds(option, items, replicas) * fullest(cost.lengths, items, replicas)


def fullest(lengths: tuple[float, ...], items: Floats | Ints, replicas: Floats | Ints) -> Floats:
    """What the fullest replica has got, relative to the mean: of r sums of x lengths the largest is about √(2 ln r / x)
    coefficients of variation above it."""
    variation = lengths_of(lengths).variation if lengths else 0.0
    result: Floats = 1 + variation * np.sqrt(2 * np.log(np.maximum(1, replicas)) / np.maximum(1, items))
    return result


def _steps(cost: WorkerCost, items: Ints, total: int) -> Floats:
    """Length units that pass before all are done: the longest, after the waves before it."""
    if not cost.lengths:
        return np.zeros(len(items))
    waves = np.maximum(1.0, items / cost.at_once)
    result: Floats = longest(cost, total) + (waves - 1) * lengths_of(cost.lengths).mean
    return result


def memory_share(
    cost: WorkerCost, option: Option, pool: Pool, chunk: int, batch: int, replicas: Ints
) -> Floats:
    held = np.minimum(cost.at_once, -(-(batch if cost.streams else chunk) // replicas))
    used = option.memory_bytes(held) + option.sharded_bytes / (replicas * option.parallel)
    result: Floats = np.maximum(0.0, np.ceil(used / pool.memory_bytes * MEMORY_STEPS - 1e-9)) / MEMORY_STEPS
    return result


# --- rows of a stage --------------------------------------------------------------------------------------


_WHOLE, _REAL = np.int64, np.float64
_ROW = np.dtype(
    [
        *((name, _WHOLE) for name in ("pool", "devices", "option", "replicas")),
        *((name, _REAL) for name in ("latency", "interval", "memory", "swap", "halves")),
    ]
)
"""One way to run a worker; `halves`: both halves of the chunk, one after the other."""
_Rows: TypeAlias = npt.NDArray[np.void]


def _worth_it(memory: Floats, *times: Floats) -> Ints:
    """What fits into memory, as far as more devices buy something: time or memory."""
    fits = np.flatnonzero(memory <= 1.0)
    is_new = np.zeros(len(fits), np.bool_)
    is_new[:1] = True
    for column in (memory[fits], *(seconds[fits] for seconds in times)):
        is_new[1:] |= column[1:] < np.minimum.accumulate(column)[:-1]
    return fits[is_new]


def _seat(problem: Problem, worker: str, row: np.void) -> Seat:
    option = problem.workers[worker].options[row["option"]]
    return Seat(worker, int(row["option"]), option.kind, option.parallel, int(row["replicas"]))


def _one_worker(problem: Problem, worker: str, rows: _Rows) -> Stage:
    devices = np.zeros((len(rows), len(problem.pools)))
    devices[np.arange(len(rows)), rows["pool"]] = rows["devices"]
    best = _best_rows(rows["latency"], rows["interval"], rows["memory"], rows["swap"], devices)
    choices = tuple((_seat(problem, worker, row),) for row in rows[best.left])
    return Stage(Frontier.of(best.table, Source(Op.STAGE)), choices, (False,) * len(choices))


def _cycle(problem: Problem, node: Node, tables: Sequence[_Rows]) -> Stage:
    """A collapsed cycle. Shared: its members alternate on the same devices, all in memory or, where they do not fit,
    one after the other with a swap each round. Apart: each has its own devices and the items go round in two halves, so
    that the slower member is always busy."""
    grids = np.meshgrid(*(np.arange(len(table)) for table in tables), indexing="ij")
    picked = np.stack([table[grid.reshape(-1)] for table, grid in zip(tables, grids)], axis=1)
    pool, count, whole, half, memory, swap = (
        picked[name] for name in ("pool", "devices", "latency", "halves", "memory", "swap")
    )
    kinds = np.arange(len(problem.pools))
    held = np.where(pool[:, :, None] == kinds, count[:, :, None], 0)
    rounds = max(problem.workers[member].rounds for member in node.members)
    slowest = half.max(axis=1)
    apart_s = np.minimum(whole.sum(axis=1), slowest + (half.sum(axis=1) - slowest) / (2 * rounds))
    can_share = (pool == pool[:, :1]).all(axis=1)
    fits = memory.sum(axis=1) <= 1.0
    shared_s = whole.sum(axis=1) + np.where(fits, 0.0, rounds * swap.sum(axis=1))
    can_part = (held.sum(axis=1) <= problem.limits).all(axis=1)
    possible = np.flatnonzero(np.concatenate([can_share, can_part]))
    seconds = np.concatenate([shared_s, apart_s])[possible]
    best = _best_rows(
        seconds,
        seconds,
        np.concatenate([np.where(fits, memory.sum(axis=1), memory.max(axis=1)), memory.max(axis=1)])[
            possible
        ],
        np.concatenate([np.where(fits, swap.sum(axis=1), swap.max(axis=1)), swap.max(axis=1)])[possible],
        np.concatenate([held.max(axis=1), held.sum(axis=1)])[possible],
    )
    rows = possible[best.left]
    seats = tuple(
        tuple(_seat(problem, member, way) for member, way in zip(node.members, picked[row % len(picked)]))
        for row in rows
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
        cost = problem.workers[worker]
        kinds = {pool.kind: pool for pool in problem.pools}
        options = [o for o in cost.options if o.kind in kinds]
        if not options:
            measured = ", ".join(sorted({o.kind for o in cost.options}))
            return (
                f"{worker} was measured on {measured}; the devices are {', '.join(kinds)}: profile it there"
            )
        smallest = min(options, key=lambda o: o.parallel)
        available = kinds[smallest.kind].count
        needed = smallest.parallel * smallest.least
        if available < needed:
            return (
                f"{worker} needs {needed} {smallest.kind} devices ({smallest.parallel} to a replica, measured on "
                f"{smallest.least} or more), there are {available}: add {needed - available}"
            )
        count = len(problem.pins.get(worker, ()))
        if count and not any(count % o.parallel == 0 and count <= kinds[o.kind].count for o in options):
            return (
                f"{worker} is pinned to {count} devices: it needs a multiple of {smallest.parallel}, "
                f"at most {available}"
            )
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
        f"{worker} does not fit: it needs {share * pool.memory_bytes / 2**30:.1f} GiB of a {pool.kind} device, "
        f"which has {pool.memory_bytes / 2**30:.1f} GiB, on {most * option.parallel} devices"
    )
    more = most + np.arange(1, 16 * most + 1)
    enough = more[memory_share(cost, option, pool, chunk, batch, more) <= 1.0]
    if len(enough):
        return f"{text}: {int(enough[0]) * option.parallel} devices would do"
    return f"{text}: more devices do not help, a larger parallel size or a smaller model does"
