"""A plan run on paper: every chunk an event, lengths drawn item by item, devices that are slow, fail, join and leave.

    admit ──▶ [stage] ──▶ [stage] ──▶ … ──▶ trained: the version goes up
      ▲                                         │
      └──────── a batch may start when at most `lag` steps are not trained ◀──┘

Every stage is a loop over its chunks, as in the runtime. It starts its next chunk when
- its producers have given all items of that chunk,
- it has ended its last one,
- and, where it shares devices, it is its side's turn (a turn is over when the side has done the shared chunk).
What ends is an event on one clock; each event looks at the stages once more. An item's length is drawn once and
goes with it,
so the chunks that a streaming engine gives first hold the short answers, and the last one waits for the longest.

Checks the cost model (which knows means and one expected maximum) and goes where no machine is at hand.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from rill.errors import PlanError
from rill.planning.cost import Problem, lengths_of, work_seconds
from rill.planning.frontier import Floats, Op
from rill.planning.price import price, seat_of, swaps_in_cycle
from rill.planning.search import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to devices. Rates are of one device."""

    failures_per_hour: float = 0.0
    repair_s: float = 300.0
    """Until a failed device is back; its replica is gone for so long and its items go to the others."""
    slow_share: float = 0.0
    """Of devices that are stragglers,"""
    slow_factor: float = 1.0
    """and how much longer they take."""
    jitter: float = 0.0
    """Relative standard deviation of every chunk."""
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        for name in ("failures_per_hour", "repair_s", "slow_share", "slow_factor", "jitter"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise PlanError(f"{name} is {value}: it counts from 0")
        if self.slow_share > 1 or self.slow_factor < 1:
            raise PlanError(
                f"stragglers are a share of the devices, at most 1, that take at least 1 time as long: got "
                f"{self.slow_share:g} and {self.slow_factor:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Replicas that join (above 0) or leave (below 0) a worker at a moment."""

    at_s: float
    worker: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Span:
    """A stage at work: for laying a prediction over a trace."""

    node: str
    step: int
    chunk: int
    start_s: float
    end_s: float
    what: Literal["work", "swap"] = "work"


@dataclass(frozen=True, kw_only=True)
class Simulated:
    step_s: tuple[float, ...]
    """Of each step: from one trained batch to the next."""
    spans: tuple[Span, ...]
    busy: dict[str, float]
    """Seconds a step in which each stage works."""
    num_devices: int
    items: int
    """Of a step."""
    num_failures: int = 0

    @property
    def mean_step_s(self) -> float:
        """Without the first step, which fills the pipeline."""
        steps = self.step_s[1:] or self.step_s
        return sum(steps) / len(steps)

    @property
    def items_per_s(self) -> float:
        return self.items / max(self.mean_step_s, 1e-12)


def simulate(
    problem: Problem, tree: Tree, *, steps: int = 5, seed: int = 0, weather: Weather | None = None
) -> Simulated:
    """Run a plan for some steps. PlanError where the plan does not fit the problem."""
    if steps < 1:
        raise PlanError(f"{steps} steps: simulate one at least")
    priced = price(problem, tree).tree
    return _Run(problem, priced, steps, np.random.default_rng(seed), weather or Weather()).run()


@dataclass(eq=False)
class _Stage:
    """One loop over chunks. Items are counted through all steps."""

    tree: Tree
    producers: list[_Stage] = field(default_factory=list)
    gates: list[_Gate] = field(default_factory=list)
    done: int = 0
    """Items that have been passed on."""
    started: int = 0
    in_flight: int = 0
    """Chunks that are being worked on: one, or those of a batch that streams."""
    replicas: int = 0
    lost: int = 0
    """Replicas that are being repaired."""
    slow: Floats = field(default_factory=lambda: np.ones(1))
    turn: int = -1
    loaded_s: float = 0.0
    """The turn for which it was last put on shared devices, and when it was there."""

    @property
    def name(self) -> str:
        return self.tree.nodes[0]

    @property
    def alive(self) -> int:
        return max(0, self.replicas - self.lost)


@dataclass
class _Gate:
    """Whose turn it is on shared devices: a stage of one side may start item i only when the other side has
    caught up."""

    chunk: int
    others: list[_Stage]
    is_second: bool
    swaps: bool

    def is_open(self, item: int) -> bool:
        turn = item // self.chunk
        needed = (turn + 1 if self.is_second else turn) * self.chunk
        return all(stage.done >= needed for stage in self.others)


_Event: TypeAlias = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""When, its number, and what happens then, to what."""


class _Run:
    def __init__(
        self, problem: Problem, tree: Tree, steps: int, random: np.random.Generator, weather: Weather
    ) -> None:
        self.problem, self.steps, self.random, self.weather = problem, steps, random, weather
        self.batch = problem.graph.batch
        self.stages = [self._new_stage(stage) for stage in tree.stages()]
        self.by_name = {stage.name: stage for stage in self.stages}
        for edge in problem.graph.edges:
            self.by_name[edge.target].producers.append(self.by_name[edge.source])
        self._add_gates(tree)
        self.sync_s = _sync_seconds(problem, tree)
        costs = [problem.workers[seat.worker] for stage in self.stages for seat in stage.tree.seats]
        self.samples = next((cost.lengths for cost in costs if cost.lengths), ())
        self.now_s = 0.0
        self.events: list[_Event] = []
        self.num_events = 0
        self.trained_s: list[float] = []
        self.admitted = 0
        self.spans: list[Span] = []
        self.num_failures = 0
        self.lengths: Floats = np.zeros(0)
        self.num_devices = sum(tree.devices)

    def run(self) -> Simulated:
        self._push(0.0, self._admit)
        if self.weather.failures_per_hour > 0:
            self._push_failure()
        for change in self.weather.changes:
            if change.worker not in self.by_name:
                raise PlanError(f"a change names {change.worker!r}; the stages are {', '.join(self.by_name)}")
            self._push(change.at_s, self._change, self.by_name[change.worker], change.replicas)
        total = self.steps * self.batch
        while len(self.trained_s) < self.steps:
            if not self.events:
                raise PlanError(
                    f"the plan stands still at {self.now_s:.1f} s: every worker waits for another"
                )
            self.now_s, _, happen, about = heapq.heappop(self.events)
            happen(*about)
            for waiting in self.stages:
                self._begin_turn(waiting)
                while waiting.started < total and self._may_start(waiting):
                    self._start(waiting)
                    self._begin_turn(waiting)
        ends = np.diff([0.0, *self.trained_s])
        return Simulated(
            step_s=tuple(float(x) for x in ends),
            spans=tuple(self.spans),
            busy=self._busy(),
            num_devices=self.num_devices,
            items=self.batch,
            num_failures=self.num_failures,
        )

    # --- events ---

    def _admit(self) -> None:
        """The next batch's prompts: as far ahead of training as the lag allows."""
        while self.admitted < min(self.steps, len(self.trained_s) + 1 + self.problem.lag):
            self.admitted += 1
            self.lengths = np.concatenate([self.lengths, self._draw(self.batch)])

    def _end(self, stage: _Stage) -> None:
        """Of a chunk."""
        stage.done += stage.tree.chunk
        stage.in_flight -= 1
        if all(s.done >= (len(self.trained_s) + 1) * self.batch for s in self.stages):
            self._push(self.now_s + self.sync_s, self._train)

    def _train(self) -> None:
        self.trained_s.append(self.now_s)
        self._admit()

    def _change(self, stage: _Stage, replicas: int) -> None:
        stage.replicas = max(0, stage.replicas + replicas)
        stage.slow = self._slow_replicas(stage)

    def _load(self, _: _Stage) -> None:
        """Who has been put on its devices may start."""

    def _repair(self, stage: _Stage) -> None:
        stage.lost -= 1

    def _fail(self) -> None:
        """Some device of some stage: its replica is lost for a while, and what it was doing is done by the others."""
        weights = np.array([sum(stage.tree.devices) for stage in self.stages], np.float64)
        stage = self.stages[int(self.random.choice(len(self.stages), p=weights / weights.sum()))]
        self.num_failures += 1
        if stage.alive > 0:
            stage.lost += 1
            self._push(self.now_s + self.weather.repair_s, self._repair, stage)
            if stage.in_flight:
                self._put_off(stage)
        self._push_failure()

    def _push_failure(self) -> None:
        rate = self.weather.failures_per_hour / 3600 * max(1, self.num_devices)
        self._push(self.now_s + float(self.random.exponential(1 / rate)), self._fail)

    def _put_off(self, stage: _Stage) -> None:
        """What is under way lasts longer: the lost replica's share again, spread over those that are left."""
        ends = [event for event in self.events if event[2:] == (self._end, (stage,))]
        self.events = [event for event in self.events if event not in ends]
        heapq.heapify(self.events)
        repair_s = 0.0 if stage.alive else self.weather.repair_s
        left_s = [(end_s - self.now_s) * (1 + 1 / max(1, stage.alive)) + repair_s for end_s, *_ in ends]
        for each_s in left_s:
            self._push(self.now_s + each_s, self._end, stage)
        last = max(i for i, span in enumerate(self.spans) if span.node == stage.name and span.what == "work")
        self.spans[last] = replace(self.spans[last], end_s=self.now_s + max(left_s))

    # --- stages ---

    def _begin_turn(self, stage: _Stage) -> None:
        """Onload as soon as the devices are free, before there is anything to work on."""
        turn = next((stage.started // g.chunk for g in stage.gates if g.swaps), stage.turn)
        if turn == stage.turn or stage.started >= self.steps * self.batch or stage.in_flight:
            return
        if not stage.producers and stage.started >= self.admitted * self.batch:
            return
        if all(gate.is_open(stage.started) for gate in stage.gates):
            swap_s = max(seat_of(self.problem, seat)[1].swap_s for seat in stage.tree.seats)
            stage.turn, stage.loaded_s = turn, self.now_s + swap_s
            self._note(stage, self.now_s, stage.loaded_s, "swap")
            self._push(stage.loaded_s, self._load, stage)

    def _may_start(self, stage: _Stage) -> bool:
        size = self.batch if self._streams(stage) else stage.tree.chunk
        if stage.in_flight or stage.alive == 0 or self.now_s < stage.loaded_s:
            return False
        if not stage.producers:
            if stage.started + size > self.admitted * self.batch:
                return False
        elif any(producer.done < stage.started + size for producer in stage.producers):
            return False
        return all(gate.is_open(stage.started) for gate in stage.gates)

    def _start(self, stage: _Stage) -> None:
        streams = self._streams(stage)
        ends = self._stream_ends(stage, self.now_s) if streams else [self.now_s + self._chunk_seconds(stage)]
        for end_s in ends:
            self._push(end_s, self._end, stage)
        self._note(stage, self.now_s, ends[-1])
        stage.in_flight = len(ends)
        stage.started += self.batch if streams else stage.tree.chunk

    def _streams(self, stage: _Stage) -> bool:
        """An engine with a whole batch in flight: where the batch is there at once."""
        if stage.producers or len(stage.tree.seats) > 1:
            return False
        return self.problem.workers[stage.tree.seats[0].worker].streams

    def _stream_ends(self, stage: _Stage, start_s: float) -> list[float]:
        """When each chunk of a batch is whole, with every answer's end from its own length and its replica's load."""
        cost, option, _ = seat_of(self.problem, stage.tree.seats[0])
        drawn = self.lengths[stage.started : stage.started + self.batch]
        replica = np.arange(self.batch) % stage.alive
        items = np.bincount(replica, minlength=stage.alive)
        work = work_seconds(option, items, np.array(stage.alive))[replica]
        if cost.lengths:
            lengths = lengths_of(cost.lengths)
            done = np.interp(drawn, lengths.sorted, [lengths.work_until(x) for x in lengths.sorted])
            totals = np.bincount(replica, weights=drawn, minlength=stage.alive)[replica]
            fair = np.maximum(1e-12, items[replica] * lengths.mean)
            waves = np.maximum(1.0, items[replica] / cost.at_once)
            wave = (np.arange(self.batch) // stage.alive) // cost.at_once
            before = np.minimum(wave, waves - 1)
            ends = work * totals / fair * (before + done) / waves + option.tail_s * (
                drawn + before * lengths.mean
            )
        else:
            ends = work * (1 + np.arange(self.batch)) / self.batch
        ends = ends * stage.slow[replica % len(stage.slow)] * self._noise() + start_s
        order = np.argsort(ends, kind="stable")
        self.lengths[stage.started : stage.started + self.batch] = drawn[
            order
        ]  # whoever is next gets them so
        chunks = ends[order][stage.tree.chunk - 1 :: stage.tree.chunk]
        chunks[-1] += option.step_s
        return [float(end) for end in chunks]

    def _chunk_seconds(self, stage: _Stage) -> float:
        chunk = stage.tree.chunk
        drawn = self.lengths[stage.started : stage.started + chunk]
        total = []
        for seat in stage.tree.seats:
            cost, option, _ = seat_of(self.problem, seat)
            alive = stage.alive if len(stage.tree.seats) == 1 else seat.replicas
            items = math.ceil(chunk / alive)
            work = float(work_seconds(option, np.array([items]), np.array([alive]))[0])
            # Longer answers are more work for everybody who handles them; packing balances replicas by tokens.
            mean = lengths_of(self.samples).mean if self.samples else 1.0
            work *= float(drawn.mean()) / mean if mean else 1.0
            waves = max(1.0, items / cost.at_once)
            steps = float(drawn.max()) + (waves - 1) * mean if cost.lengths else 0.0
            seconds = work + option.tail_s * steps
            seconds = seconds * float(stage.slow.max()) * self._noise() + option.step_s * chunk / self.batch
            total.append(seconds)
        if len(total) == 1:
            return total[0]
        if stage.tree.is_apart:  # the members' halves overlap: as the cost model says
            return stage.tree.latency_s * self._noise() * float(stage.slow.max())
        return sum(total) + swaps_in_cycle(self.problem, stage.tree)

    def _new_stage(self, tree: Tree) -> _Stage:
        stage = _Stage(tree, replicas=min(seat.replicas for seat in tree.seats))
        stage.slow = self._slow_replicas(stage)
        return stage

    def _slow_replicas(self, stage: _Stage) -> Floats:
        """A replica is as slow as its slowest device."""
        slow = np.ones(max(1, stage.replicas))
        if self.weather.slow_share > 0:
            parallel = stage.tree.seats[0].parallel
            chance = 1 - (1 - self.weather.slow_share) ** parallel
            slow[self.random.random(len(slow)) < chance] = self.weather.slow_factor
        return slow

    def _add_gates(self, tree: Tree) -> None:
        if tree.op in (Op.TURNS, Op.TOGETHER):
            sides = [[self.by_name[name] for name in half.nodes] for half in tree.halves]
            for number, (mine, others) in enumerate((sides, sides[::-1])):
                for stage in mine:
                    stage.gates.append(_Gate(tree.chunk, others, bool(number), tree.op is Op.TURNS))
        for half in tree.halves:
            self._add_gates(half)

    # --- draws and records ---

    def _draw(self, num: int) -> Floats:
        return self.random.choice(np.asarray(self.samples), num) if self.samples else np.ones(num)

    def _noise(self) -> float:
        jitter = self.weather.jitter
        return max(0.1, 1 + jitter * float(self.random.standard_normal())) if jitter else 1.0

    def _push(self, at_s: float, happen: Callable[..., None], *about: Any) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at_s, self.num_events, happen, about))

    def _note(
        self, stage: _Stage, start_s: float, end_s: float, what: Literal["work", "swap"] = "work"
    ) -> None:
        step, item = divmod(stage.started, self.batch)
        self.spans.append(Span(stage.name, step, item // stage.tree.chunk, start_s, end_s, what))

    def _busy(self) -> dict[str, float]:
        busy: dict[str, float] = {}
        for span in self.spans:
            key = span.node if span.what == "work" else "swaps"
            busy[key] = busy.get(key, 0.0) + span.end_s - span.start_s
        busy["weights"] = self.sync_s * self.steps
        return {name: seconds / self.steps for name, seconds in busy.items() if seconds > 0}


def _sync_seconds(problem: Problem, tree: Tree) -> float:
    """Weights, once a step: over the wire where the two workers are apart, within the device where they share it."""
    total = 0.0
    for sync in problem.graph.syncs:
        is_apart = tree.meeting(sync.source, sync.target).op in (Op.SERIES, Op.PARALLEL)
        total += sync.bytes / (problem.link_bytes_per_s if is_apart else problem.local_bytes_per_s)
    return total
