"""The best plan for a workflow on given devices: RLinf's Algorithm 1, exact, over frontiers instead of single times.

Algorithm 1 cuts the graph in two along every s–t cut and lets the halves share the devices or split them, recursively.
It keeps one time for a part and a number of devices. That is too little: a part inside a pipeline matters by two
figures, the seconds a chunk needs to pass (latency f) and the seconds between chunks (interval i), and the part that is
fastest alone is not the one that makes the fastest pipeline. So a part at a chunk size b has a frontier of ways, and

    stage                      f, i              what `cost` says, for every number of devices
    series     devices add     f = f_s + f_t + transfer      i = max(i_s, i_t, transfer)
    parallel   devices add     f = max(f_s, f_t)             i = max(i_s, i_t)
    turns      devices max     f = i = f_s + f_t + swap      one in memory at a time
    together   devices max     f = i = f_s + f_t             if both fit into memory
    finer      b in k chunks   f = f' + (k − 1)·i'           i = k·i'

`finer` of `series` is the paper's T_critical + (M/m − 1)·T_bottleneck, with a granularity m for every edge of its own.
A step with lag η lasts max(i, f/(η + 1)) of the whole graph at the whole batch: η + 1 batches are under way at most.
Synchronous is lag 0.

Why it is fast and still exact:
- the key is (part, chunk size); devices are a column of the frontier, not a loop;
- series, parallel and sharing are associative, so only one bracketing of each is built (`_LEFT_OUT`);
- a first pass over few device counts gives a bound; the second, over all, drops ways that cannot stay below it.

tests/planning/test_search.py holds it against brute force. Called by `rill plan`, `rill simulate` and `replan`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

from rill.errors import PlanError
from rill.planning.cost import Problem, Seat, Stage, why_no_stage
from rill.planning.frontier import (
    DEVICES,
    INTERVAL,
    LATENCY,
    MEMORY,
    MIX,
    SWAP,
    Bools,
    Floats,
    Frontier,
    Ints,
    Op,
    Source,
    product,
)

_SPLIT = (Op.SERIES, Op.PARALLEL)
_SHARE = (Op.TURNS, Op.TOGETHER)
_LEFT_OUT: dict[Op, tuple[Op, ...]] = {
    Op.SERIES: (Op.SERIES,),  # (a;b);c is a;(b;c)
    Op.PARALLEL: (Op.PARALLEL,),
    Op.TURNS: (Op.TURNS, Op.TOGETHER),
    Op.TOGETHER: (Op.TOGETHER,),
}
"""What may not be the first half of a combination, because another bracketing costs the same or less."""

_SHARES, _SPLITS, _BOTH = 1, 2, 3
_SLACK = 1 + 1e-9
_ROUGH = (1, 2, 3, 4, 6, 8, 16, 64)
"""The first pass gives a stage only these parts of all devices, and cuts a batch into the smallest chunks or not at
all; what it finds bounds the second, which looks at all."""

Stages: TypeAlias = dict[tuple[int, int], Stage]
"""By node and chunk size."""


class Mode(StrEnum):
    """Which plans are looked at."""

    AUTO = "auto"
    SHARED = "shared"
    """All workers take turns on all devices."""
    SPLIT = "split"
    """Every worker has devices of its own."""
    HYBRID = "hybrid"
    """Some share, some do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A way to run a part of the graph, as it was put together."""

    op: Op
    nodes: tuple[str, ...]
    chunk: int
    """Items that pass at a time."""
    devices: tuple[int, ...] = ()
    """Of each kind. These and the times are filled in by the search, and by `price`."""
    latency_s: float = 0.0
    interval_s: float = 0.0
    memory: float = 0.0
    """Share of the fullest device."""
    halves: tuple[Tree, ...] = ()
    seats: tuple[Seat, ...] = ()
    """Of a stage: its worker, or the members of a cycle."""
    is_apart: bool = False
    """Of a cycle: whether the members have devices of their own."""

    def stages(self) -> Iterator[Tree]:
        if self.op is Op.STAGE:
            yield self
        for half in self.halves:
            yield from half.stages()

    def meeting(self, source: str, target: str) -> Tree:
        """Where two nodes of the graph part."""
        for half in self.halves:
            if source in half.nodes and target in half.nodes:
                return half.meeting(source, target)
        return self

    def ops(self) -> set[Op]:
        return {self.op}.union(*(half.ops() for half in self.halves))

    @property
    def mode(self) -> Mode:
        shares = bool(self.ops() & set(_SHARE))
        splits = bool(self.ops() & set(_SPLIT)) or any(stage.is_apart for stage in self.stages())
        if shares and splits:
            return Mode.HYBRID
        return Mode.SHARED if shares or not splits else Mode.SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that the search found, and how long a step takes under it."""

    step_s: float
    tree: Tree


def search(problem: Problem, mode: Mode = Mode.AUTO) -> Found:
    """The plan with the shortest step, of all that `mode` allows. PlanError names what makes every plan impossible."""
    stages = {
        (i, chunk): problem.stage(i, chunk)
        for i in range(len(problem.graph.nodes))
        for chunk in problem.levels
    }
    for bound_s in _first_bounds(problem, mode, stages):
        for is_rough in (True, False):
            run = _Search(problem, mode, stages, bound_s, is_rough)
            root = run.root()
            bound_s = min(bound_s, float(_step_s(problem, root).min(initial=np.inf)))
        if len(root):
            row = int(np.argmin(_step_s(problem, root)))
            tree = run.tree(problem.graph.everything, problem.graph.batch, root, row)
            return Found(step_s=float(_step_s(problem, root)[row]), tree=tree)
    raise PlanError(_why_not(problem, mode, stages))


def best_of_modes(problem: Problem) -> dict[Mode, Found | str]:
    """The best plan of every mode, or why it has none. PlanError where none has one."""
    found: dict[Mode, Found | str] = {}
    for mode in (Mode.SHARED, Mode.SPLIT, Mode.HYBRID):
        if mode is Mode.HYBRID and _num_workers(problem) < 3:
            continue
        try:
            found[mode] = search(problem, mode)
        except PlanError as error:
            found[mode] = str(error)
    if all(isinstance(one, str) for one in found.values()):
        search(problem)  # raises, with the reason for all of them
    return found


def _num_workers(problem: Problem) -> int:
    return sum(len(node.members) or 1 for node in problem.graph.nodes)


def _step_s(problem: Problem, frontier: Frontier) -> Floats:
    return np.maximum(frontier.interval, frontier.latency / (problem.lag + 1))


def _first_bounds(problem: Problem, mode: Mode, stages: Stages) -> list[float]:
    """Steps that some plan is expected to stay below, to begin with; the last is one that every plan does."""
    if mode is Mode.HYBRID:  # twice the best of all is a guess
        return [2 * search(problem).step_s, np.inf]
    is_free = not _pinned_pairs(problem) and not any(node.members for node in problem.graph.nodes)
    if mode is Mode.SPLIT or not is_free or problem.lag:
        return [np.inf]
    # All workers in turns on all devices, each as fast as it can be: a plan that there is.
    wholes = [stages[i, problem.graph.batch].frontier for i in range(len(problem.graph.nodes))]
    turns = sum(float((way.latency + way.table[:, SWAP]).min(initial=np.inf)) for way in wholes)
    return [turns + sum(sync.bytes for sync in problem.graph.syncs) / problem.local_bytes_per_s]


@dataclass(frozen=True, slots=True)
class _Least:
    """Of a node, at any chunk size and on any devices."""

    device_s: float
    """Device-seconds of a step."""
    latency_s: float
    """Of one chunk."""
    batch_s: float
    """Of all chunks."""


@dataclass(frozen=True, slots=True)
class _Best:
    """The least in each column of a frontier, and of devices times seconds: no row is better in anything."""

    latency_s: float = 0.0
    interval_s: float = 0.0
    swap_s: float = 0.0
    devices: float = 0.0
    device_latency_s: float = 0.0
    device_interval_s: float = 0.0

    @classmethod
    def of(cls, ways: Frontier) -> _Best:
        if not len(ways):
            return cls()
        devices = ways.devices.sum(axis=1)
        least = ways.table.min(axis=0)
        held = (devices[:, None] * ways.table[:, : INTERVAL + 1]).min(axis=0)
        return cls(
            latency_s=float(least[LATENCY]),
            interval_s=float(least[INTERVAL]),
            swap_s=float(least[SWAP]),
            devices=float(devices.min()),
            device_latency_s=float(held[LATENCY]),
            device_interval_s=float(held[INTERVAL]),
        )


class _Search:
    """One pass over all parts and chunk sizes, with a bound on the step and on the choices looked at of a stage."""

    def __init__(self, problem: Problem, mode: Mode, stages: Stages, bound_s: float, is_rough: bool) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.mode = mode
        self.bound_s = bound_s * _SLACK
        self._bound_device_s = self.bound_s * problem.num_devices
        self._is_bounded = math.isfinite(bound_s)
        self._is_rough = is_rough
        self._levels = problem.levels[:: len(problem.levels) - 1 or 1] if is_rough else problem.levels
        self._memo: dict[tuple[int, int], Frontier] = {}
        self._operands: dict[tuple[int, int, Op, bool], Frontier] = {}
        self._bests: dict[tuple[int, int], _Best] = {}
        self._chains: dict[int, tuple[float, float, float, float]] = {}
        self._between: dict[tuple[int, int], tuple[list[float], float]] = {}
        self._known_cuts: dict[int, list[int]] = {}
        self._stages = stages
        self._streaming = sum(
            1 << i
            for i, node in enumerate(self.graph.nodes)
            if any(problem.workers[m].streams for m in node.members or (node.name,))
        )
        self._least = [self._least_of(i) for i in range(len(self.graph.nodes))]
        self._never_fits, self._always_fits = self._memory_matters()
        self._pairs = _pinned_pairs(problem)

    def root(self) -> Frontier:
        """The ways to run everything."""
        root = self.frontier(self.graph.everything, self.graph.batch)
        return root.rows(root.table[:, MIX] == _BOTH) if self.mode is Mode.HYBRID else root

    def frontier(self, part: int, chunk: int) -> Frontier:
        """All unbeaten ways to pass `chunk` items through a part: FindSchedule of Algorithm 1."""
        known = self._memo.get((part, chunk))
        if known is not None:
            return known
        ways: list[Frontier] = []
        if part & (part - 1) == 0:
            ways.append(self._stage(part, chunk))
        for source_side in self._cuts(part):
            ways += self._combined(source_side, part & ~source_side, chunk)
        ways += self._finer(part, chunk)
        ways = [way for way in ways if len(way)]
        found = Frontier.union(ways, len(self.problem.pools)).best()
        self._memo[part, chunk] = found
        return found

    def _stage(self, part: int, chunk: int) -> Frontier:
        stage = self._stages[part.bit_length() - 1, chunk]
        ways, is_apart = stage.frontier, np.array(stage.is_apart, np.bool_)
        is_cycle = bool(self.graph.nodes[part.bit_length() - 1].members)
        if is_cycle and self.mode in (Mode.SHARED, Mode.SPLIT):
            ways = ways.rows(is_apart == (self.mode is Mode.SPLIT))
        table = ways.table.copy()
        if is_cycle and self.mode is Mode.HYBRID:
            table[:, MIX] = np.where(is_apart, _SPLITS, _SHARES)
        if self._never_fits or self._always_fits:
            table[:, MEMORY] = 0.0  # the answer is known: no need of a column
        ways = replace(ways, table=table).rows(self._is_below(part, chunk, table))
        return ways.rows(self._few(ways)) if self._is_rough and len(ways) > len(_ROUGH) else ways

    def _few(self, ways: Frontier) -> Ints:
        """For each part of all devices, the most that a way takes of it; the way with fewest devices too."""
        devices = ways.devices.sum(axis=1)
        order = np.argsort(devices, kind="stable")
        most = np.array([self.problem.num_devices // share for share in _ROUGH])
        places = np.searchsorted(devices[order], most, side="right") - 1
        return np.unique(order[np.maximum(0, np.append(places, 0))])

    def _combined(self, first: int, second: int, chunk: int) -> Iterator[Frontier]:
        """The two sides of a cut, put together in every way that is allowed."""
        if not len(self.frontier(first, chunk)) or not len(self.frontier(second, chunk)):
            return
        transfers_s, sync_apart_s, sync_local_s = self._crossing(first, second, chunk)
        share_of_step = chunk / self.graph.batch
        must_share, must_split = self._pinned(first, second)
        if self.mode is not Mode.SHARED and not must_share:
            op = Op.SERIES if transfers_s or sync_apart_s else Op.PARALLEL
            slowest_s = max([*transfers_s, sync_apart_s * share_of_step])
            yield self._product(op, first, second, chunk, sum(transfers_s) + sync_apart_s, slowest_s)
        # An engine with all prompts in flight cannot leave its devices between two chunks.
        takes_turns = chunk == self.graph.batch or not (first | second) & self._streaming
        if self.mode is not Mode.SPLIT and not must_split and takes_turns:
            added_s = sync_local_s * share_of_step
            # Ahead of training it never lets go of them.
            if not self._always_fits and not (self.problem.lag and (first | second) & self._streaming):
                yield self._product(Op.TURNS, first, second, chunk, added_s, 0.0)
            if not self._never_fits:
                yield self._product(Op.TOGETHER, first, second, chunk, added_s, 0.0)

    def _product(
        self, op: Op, first: int, second: int, chunk: int, added_s: float, slowest_s: float
    ) -> Frontier:
        limits, part = self.problem.limits, first | second
        # Nothing follows a whole batch in a synchronous step: a pipeline is as long as its latency.
        is_whole = op in _SHARE or (chunk == self.graph.batch and self.problem.lag == 0)
        bests = self._best(first, chunk), self._best(second, chunk)
        if self._is_hopeless(op, part, chunk, *bests, added_s, slowest_s, is_whole):
            return Frontier.union((), len(limits))
        left, right = self._operand(first, chunk, op, is_left=True), self._operand(second, chunk, op)

        def combine(s: Floats, t: Floats) -> tuple[Floats, Ints, Ints]:
            """Pairs that lead below the bound become rows."""
            possible, latency, interval, devices = pairs(s, t)
            a, b = np.nonzero(possible)
            if not len(a):
                return s[:0], a, b
            table = np.maximum(s[a], t[b])
            table[:, LATENCY], table[:, INTERVAL] = latency[a, b], interval[a, b]
            for number, held in enumerate(devices):
                table[:, DEVICES + number] = held[a, b]
            if op is Op.TURNS:
                table[:, SWAP] = 0.0
            elif op is Op.TOGETHER:
                table[:, MEMORY] = s[a, MEMORY] + t[b, MEMORY]
                table[:, SWAP] = s[a, SWAP] + t[b, SWAP]
            if self.mode is Mode.HYBRID:
                bits = s[a, MIX].astype(np.int64) | t[b, MIX].astype(np.int64)
                table[:, MIX] = bits | (_SPLITS if op in _SPLIT else _SHARES)
            return table, a, b

        def pairs(s: Floats, t: Floats) -> tuple[Bools, Floats, Floats, list[Floats]]:
            """Of every pair: whether it is possible, its times, and its devices of each kind."""
            join = np.add if op is not Op.PARALLEL else np.maximum
            latency = join.outer(s[:, LATENCY], t[:, LATENCY]) + added_s
            if op is Op.TURNS:
                latency += np.add.outer(s[:, SWAP], t[:, SWAP])
            if is_whole:
                interval = latency
            else:
                interval = np.maximum(np.maximum.outer(s[:, INTERVAL], t[:, INTERVAL]), slowest_s)
            together = np.add if op in _SPLIT else np.maximum
            devices = [together.outer(s[:, c], t[:, c]) for c in range(DEVICES, s.shape[1])]
            possible = self._below_bound(part, chunk, latency, interval, sum(devices[1:], devices[0]))
            for held, limit in zip(devices, limits):
                possible &= held <= limit
            if op is Op.TOGETHER:
                possible &= np.add.outer(s[:, MEMORY], t[:, MEMORY]) <= 1.0
            return possible, latency, interval, devices

        return product(Source(op, left, right, (first, second), chunk), combine)

    def _operand(self, part: int, chunk: int, op: Op, is_left: bool = False) -> Frontier:
        key = (part, chunk, op, is_left)
        if key not in self._operands:
            if is_left:
                ways = self._operand(part, chunk, op).without(*_LEFT_OUT[op])
            else:
                ways = self.frontier(part, chunk).best_for(op)
            self._operands[key] = ways
        return self._operands[key]

    def _best(self, part: int, chunk: int) -> _Best:
        if (part, chunk) not in self._bests:
            self._bests[part, chunk] = _Best.of(self.frontier(part, chunk))
        return self._bests[part, chunk]

    def _finer(self, part: int, chunk: int) -> Iterator[Frontier]:
        """A chunk in k smaller ones."""
        for smaller in self._levels:
            if smaller < chunk and chunk % smaller == 0:
                inner = self.frontier(part, smaller).without(Op.FINER)  # smaller ones once: twice is the same
                if not len(inner):
                    continue
                k = chunk // smaller
                table = inner.table.copy()
                table[:, LATENCY] += (k - 1) * inner.interval
                table[:, INTERVAL] *= k
                if chunk == self.graph.batch and self.problem.lag == 0:
                    table[:, INTERVAL] = table[:, LATENCY]
                made = Frontier.of(table, Source(Op.FINER, inner, None, (part, 0), smaller))
                yield made.rows(self._is_below(part, chunk, table))

    # --- what cannot lead to a step below the bound ---

    def _is_hopeless(
        self,
        op: Op,
        part: int,
        chunk: int,
        s: _Best,
        t: _Best,
        added_s: float,
        slowest_s: float,
        is_whole: bool,
    ) -> bool:
        """Whether no pair of two frontiers can stay below the bound, by the best of each alone: most combinations end
        here. In a pipeline (a + b)(c + d) >= (√ac + √bd)² says more of devices times seconds than their minima do."""
        if not self._is_bounded:
            return False
        latency_s = max(s.latency_s, t.latency_s) if op is Op.PARALLEL else s.latency_s + t.latency_s
        latency_s += added_s + (s.swap_s + t.swap_s if op is Op.TURNS else 0.0)
        interval_s = latency_s if is_whole else max(s.interval_s, t.interval_s, slowest_s)
        devices = s.devices + t.devices if op in _SPLIT else max(s.devices, t.devices)
        if not self._below_bound(part, chunk, latency_s, interval_s, devices):
            return True
        if op is not Op.SERIES or self.problem.lag:
            return False
        k = self.graph.batch / chunk
        first = (math.sqrt(s.device_latency_s) + math.sqrt(t.device_latency_s)) ** 2
        later = first if is_whole else s.device_interval_s + t.device_interval_s
        return first + (k - 1) * later > self._bound_device_s - self._outside(part)[0]

    def _is_below(self, part: int, chunk: int, table: Floats) -> Bools:
        devices = table[:, DEVICES:].sum(axis=1)
        result: Bools = self._below_bound(part, chunk, table[:, LATENCY], table[:, INTERVAL], devices)
        return result

    def _below_bound(self, part: int, chunk: int, latency: Any, interval: Any, devices: Any) -> Any:
        """Whether one way, or each of several (Floats), may lead below the bound, by three lower bounds of a step that
        contains it. Devices: it holds its own while k chunks pass, the other workers need at least their least
        device-seconds, and all devices together have N · step. Latency: k chunks must pass here and one through
        whatever comes before and after; and one must pass here while one of those works through the whole batch. A part
        that passes the whole batch at once keeps what comes before it apart from what comes after it: one on each side
        works through the whole batch."""
        if not self._is_bounded:
            return np.ones(latency.shape, np.bool_)
        k = self.graph.batch / chunk
        rest, chain, chain_and_batch, chain_of_batches = self._outside(part)
        if chunk == self.graph.batch:
            chain_and_batch = chain_of_batches
        limit_s = self.bound_s * (self.problem.lag + 1)
        if interval is latency:
            result = latency <= min(limit_s - chain_and_batch, (limit_s - chain) / k)
            result &= devices * latency <= (self._bound_device_s - rest) / k
        else:
            later = (k - 1) * interval
            result = latency <= limit_s - chain_and_batch
            result &= latency + later <= limit_s - chain
            # Synchronous, no batch is under way behind another: a pipeline's devices wait while it fills and empties.
            first = latency if self.problem.lag == 0 else np.minimum(latency, interval)
            held = devices * (first + later)
            result &= held <= self._bound_device_s - rest
        return result

    def _outside(self, part: int) -> tuple[float, float, float, float]:
        """Of the nodes outside a part: their device-seconds, and the longest chain of them through it: by the least
        latency of each, with one working through its whole batch, and with one before and one after it doing so."""
        if part not in self._chains:
            num, parents = len(self.graph.nodes), self.graph.parents
            zero = (0.0, 0.0)
            up, down = [zero] * num, [zero] * num
            for i in range(num):
                up[i] = self._longest(part, up, [p for p in range(num) if parents[i] >> p & 1])
            for i in reversed(range(num)):
                down[i] = self._longest(part, down, [c for c in range(num) if parents[c] >> i & 1])
            inside = [i for i in range(num) if part >> i & 1]
            self._chains[part] = (
                sum(least.device_s for i, least in enumerate(self._least) if not part >> i & 1),
                max(up[i][0] + down[i][0] for i in inside),
                max(max(up[i][1] + down[i][0], up[i][0] + down[i][1]) for i in inside),
                max(up[i][1] for i in inside) + max(down[i][1] for i in inside),
            )
        return self._chains[part]

    def _longest(self, part: int, so_far: list[tuple[float, float]], nexts: list[int]) -> tuple[float, float]:
        best = (0.0, 0.0)
        for i in nexts:
            chunk_s, batch_s = (
                (0.0, 0.0) if part >> i & 1 else (self._least[i].latency_s, self._least[i].batch_s)
            )
            chain, with_batch = so_far[i]
            best = (max(best[0], chain + chunk_s), max(best[1], with_batch + chunk_s, chain + batch_s))
        return best

    def _least_of(self, node: int) -> _Least:
        device_s = latency_s = batch_s = np.inf
        for chunk in self.problem.levels:
            ways = self._stages[node, chunk].frontier
            k = self.graph.batch / chunk
            whole = ways.latency + (k - 1) * ways.interval
            held = np.minimum(ways.latency, ways.interval) + (k - 1) * ways.interval
            if chunk == self.graph.batch or not self._streaming >> node & 1:
                device_s = min(device_s, (ways.devices.sum(axis=1) * held).min(initial=np.inf))
            latency_s = min(latency_s, ways.latency.min(initial=np.inf))
            batch_s = min(batch_s, whole.min(initial=np.inf))
        finite = [0.0 if np.isinf(x) else float(x) for x in (device_s, latency_s, batch_s)]
        return _Least(*finite)

    def _memory_matters(self) -> tuple[bool, bool]:
        """Whether no two workers ever fit into a device together, and whether all of them always do."""
        least, most = [], []
        for i in range(len(self.graph.nodes)):
            columns = [self._stages[i, chunk].frontier.memory for chunk in self.problem.levels]
            least.append(min(float(column.min(initial=np.inf)) for column in columns))
            most.append(max(float(column.max(initial=0.0)) for column in columns))
        least.sort()
        return len(least) > 1 and least[0] + least[1] > 1.0, sum(most) <= 1.0

    # --- cuts ---

    def _cuts(self, part: int) -> list[int]:
        """One of the two cuts between sides that do not feed each other: the other costs the same."""
        if part not in self._known_cuts:
            lowest = part & -part
            parents = self.graph.parents
            self._known_cuts[part] = [
                side
                for side in self.graph.cuts(part)
                if side & lowest
                or any(parents[i] & side for i in range(len(parents)) if (part & ~side) >> i & 1)
            ]
        return self._known_cuts[part]

    def _crossing(self, first: int, second: int, chunk: int) -> tuple[list[float], float, float]:
        """Seconds that a cut adds: of each edge, for a chunk; of the weights, for a step, if the sides are apart and
        if they share devices."""

        if (first, second) not in self._between:
            self._between[first, second] = self.graph.between(first, second)
        sizes, weights = self._between[first, second]
        link, local = self.problem.link_bytes_per_s, self.problem.local_bytes_per_s
        return [size * chunk / link for size in sizes], weights / link, weights / local

    def _pinned(self, first: int, second: int) -> tuple[bool, bool]:
        """Whether pinned device ids on the two sides say: share, or split."""
        relations = {
            is_shared
            for (a, b), is_shared in self._pairs.items()
            if (first >> a & 1 and second >> b & 1) or (first >> b & 1 and second >> a & 1)
        }
        return True in relations, False in relations

    # --- reading a plan back ---

    def tree(self, part: int, chunk: int, frontier: Frontier, row: int) -> Tree:
        source = frontier.sources[frontier.source[row]]
        left, right = int(frontier.left[row]), int(frontier.right[row])
        halves: tuple[Tree, ...] = ()
        seats: tuple[Seat, ...] = ()
        is_apart = False
        if source.left is None:
            stage = self._stages[part.bit_length() - 1, chunk]
            seats, is_apart = stage.choices[left], stage.is_apart[left]
        elif source.right is None:
            halves = (self.tree(part, source.chunk, source.left, left),)
        else:
            first, second = source.parts
            halves = (
                self.tree(first, chunk, source.left, left),
                self.tree(second, chunk, source.right, right),
            )
        latency, interval, memory, _, _, *devices = (float(x) for x in frontier.table[row])
        return Tree(
            op=source.op,
            nodes=tuple(self.graph.names_in(part)),
            chunk=chunk,
            devices=tuple(int(n) for n in devices),
            latency_s=latency,
            interval_s=interval,
            memory=memory,
            halves=halves,
            seats=seats,
            is_apart=is_apart,
        )


# --- constraints ------------------------------------------------------------------------------------------


def _pinned_pairs(problem: Problem) -> dict[tuple[int, int], bool]:
    """Nodes whose device ids are pinned: whether the two share. Ids that overlap in part have no plan."""
    ids: dict[int, frozenset[int]] = {}
    for index, node in enumerate(problem.graph.nodes):
        pinned = [set(problem.pins.get(m, ())) for m in node.members or (node.name,)]
        if any(pinned):
            ids[index] = frozenset(set().union(*pinned))
    pairs = {}
    for a, b in itertools.combinations(ids, 2):
        common = ids[a] & ids[b]
        if common and ids[a] != ids[b]:
            names = problem.graph.nodes[a].name, problem.graph.nodes[b].name
            shown = ", ".join(map(str, sorted(common)))
            raise PlanError(
                f"{names[0]} and {names[1]} are pinned to devices that overlap in part ({shown}): "
                "give them the same devices, or none in common"
            )
        pairs[a, b] = bool(common)
    return pairs


def _why_not(problem: Problem, mode: Mode, stages: Stages) -> str:
    """The constraint that no plan can meet, and the smallest change that would help."""
    for index, node in enumerate(problem.graph.nodes):
        if not any(len(stages[index, chunk].frontier) for chunk in problem.levels):
            return why_no_stage(problem, node)
    least = []
    for index in range(len(problem.graph.nodes)):
        ways = [stages[index, chunk].frontier for chunk in problem.levels]
        members = problem.graph.nodes[index].members if mode is Mode.SPLIT else ()
        apart = sum(min(o.parallel * o.least for o in problem.workers[m].options) for m in members)
        least.append(max(apart, int(min(w.devices.sum(axis=1).min() for w in ways if len(w)))))
    names = [f"{node.name} {num}" for node, num in zip(problem.graph.nodes, least)]
    missing = sum(least) - problem.num_devices
    streams = [any(problem.workers[m].streams for m in n.members or (n.name,)) for n in problem.graph.nodes]
    if problem.lag and mode is not Mode.SPLIT and any(streams):
        apart = sum(num for num, is_stream in zip(least, streams) if is_stream)
        others = max((num for num, is_stream in zip(least, streams) if not is_stream), default=0)
        return (
            f"no {mode} plan with lag {problem.lag}: engines that run ahead hold their devices, and others that need "
            "them too never get a turn. Set the lag to 0, let them stay in memory together (cluster.colocate), or "
            f"give {apart + others} devices or more (there are {problem.num_devices})"
        )
    if missing > 0 and mode is not Mode.SHARED:
        return (
            f"{mode} needs at least {sum(least)} devices ({', '.join(names)}), there are {problem.num_devices}: "
            f"add {missing}, or let workers share"
        )
    if mode is Mode.HYBRID:
        return "no plan in which some workers share devices and others do not"
    return f"no {mode} plan obeys the pins ({', '.join(sorted(problem.pins)) or 'none'}): lift one of them"
