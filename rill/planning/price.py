"""What a given plan costs: the search's formulas applied to one tree, with its devices and chunks as they are.

Called where a plan did not come out of the search just now: a file that a person wrote or edited, and the plan that a
run follows while `replan` looks for a better one. For a tree that the search found it gives the search's own figures.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rill.errors import PlanError
from rill.planning.cost import Option, Pool, Problem, Seat, WorkerCost, call_seconds, is_stream, memory_share
from rill.planning.frontier import Op
from rill.planning.search import Found, Tree


def price(problem: Problem, tree: Tree) -> Found:
    """The tree with the problem's times and memory, and the step. PlanError where it does not fit."""
    priced = min((way for way, _ in _ways(problem, tree)), key=lambda way: _step_s(problem, way))
    for count, pool in zip(priced.devices, problem.pools):
        if count > pool.count:
            raise PlanError(
                f"the plan needs {count} {pool.kind} devices, there are {pool.count}: make a plan for these"
            )
    if set(priced.nodes) != {node.name for node in problem.graph.nodes}:
        raise PlanError(
            f"the plan runs {', '.join(priced.nodes)}; the workflow has "
            f"{', '.join(node.name for node in problem.graph.nodes)}: make a plan for it"
        )
    return Found(step_s=_step_s(problem, priced), tree=priced)


def _step_s(problem: Problem, tree: Tree) -> float:
    return tree.latency_s if problem.lag == 0 else max(tree.interval_s, tree.latency_s / (problem.lag + 1))


def stage_seconds(problem: Problem, tree: Tree) -> float:
    """Seconds of a step in which a stage works. A stream's two figures say when a consumer is done with it: it works
    as long as for the whole batch at once."""
    batch, (seat, *others) = problem.graph.batch, tree.seats
    cost, option, _ = seat_of(problem, seat)
    if not others and is_stream(cost, tree.chunk, batch):
        return float(call_seconds(cost, option, batch, batch, np.array([seat.replicas]))[0][0])
    k = batch / tree.chunk
    return tree.latency_s + (k - 1) * tree.interval_s


def seat_of(problem: Problem, seat: Seat) -> tuple[WorkerCost, Option, Pool]:
    cost = problem.workers.get(seat.worker)
    if cost is None:
        raise PlanError(f"the plan places {seat.worker}, which the profile does not know")
    pool = next((pool for pool in problem.pools if pool.kind == seat.kind), None)
    if pool is None:
        raise PlanError(f"the plan places {seat.worker} on {seat.kind}: the devices are of other kinds")
    for option in cost.options:
        if (option.kind, option.parallel) == (seat.kind, seat.parallel):
            return cost, option, pool
    raise PlanError(
        f"{seat.worker} was not measured on {seat.kind} with {seat.parallel} devices to a replica"
    )


def swaps_in_cycle(problem: Problem, tree: Tree) -> float:
    """Seconds in which the members of a cycle leave their shared devices to each other, every round; 0 if they fit."""
    seats = [(seat, *seat_of(problem, seat)) for seat in tree.seats]
    memory = sum(
        float(memory_share(cost, option, pool, tree.chunk, problem.graph.batch, np.array([seat.replicas]))[0])
        for seat, cost, option, pool in seats
    )
    rounds = max(cost.rounds for _, cost, _, _ in seats)
    return rounds * sum(option.swap_s for _, _, option, _ in seats) if memory > 1.0 else 0.0


def _ways(problem: Problem, tree: Tree) -> list[tuple[Tree, float]]:
    """The tree with its figures, and its swap seconds: one for each pace of its streams, without those that another
    beats."""
    if tree.op is Op.STAGE:
        costs = [seat_of(problem, seat)[0] for seat in tree.seats]
        streams = any(is_stream(cost, tree.chunk, problem.graph.batch) for cost in costs)
        found = [_stage(problem, tree, pace) for pace in (problem.paces if streams else (1.0,))]
    elif tree.op is Op.FINER:
        found = [(_finer(tree, inner), swap) for inner, swap in _ways(problem, tree.halves[0])]
    else:
        first, second = (_ways(problem, half) for half in tree.halves)
        found = [_pair(problem, tree, s, t) for s in first for t in second]
    kept: list[tuple[Tree, float]] = []
    for way, swap in sorted(found, key=lambda each: (each[0].latency_s, each[0].interval_s)):
        if not kept or way.interval_s < kept[-1][0].interval_s:
            kept.append((way, swap))
    return kept


def _finer(tree: Tree, inner: Tree) -> Tree:
    k = tree.chunk // inner.chunk
    latency = inner.latency_s + (k - 1) * inner.interval_s
    return replace(
        inner, op=Op.FINER, chunk=tree.chunk, halves=(inner,), seats=(), latency_s=latency,
        interval_s=k * inner.interval_s,
    )  # fmt: skip


def _pair(
    problem: Problem, tree: Tree, first: tuple[Tree, float], second: tuple[Tree, float]
) -> tuple[Tree, float]:
    (s, swap_s), (t, swap_t) = first, second
    sizes, weights = problem.graph.between(problem.graph.mask(s.nodes), problem.graph.mask(t.nodes))
    transfers = [size * tree.chunk / problem.link_bytes_per_s for size in sizes]
    apart, local = weights / problem.link_bytes_per_s, weights / problem.local_bytes_per_s
    share_of_step = tree.chunk / problem.graph.batch
    memory, swap = max(s.memory, t.memory), 0.0
    if tree.op in (Op.SERIES, Op.PARALLEL):
        devices = tuple(a + b for a, b in zip(s.devices, t.devices))
        latency = s.latency_s + t.latency_s if transfers or apart else max(s.latency_s, t.latency_s)
        latency += sum(transfers) + apart
        interval = max([s.interval_s, t.interval_s, *transfers, apart * share_of_step])
        swap = max(swap_s, swap_t)
    else:
        devices = tuple(max(a, b) for a, b in zip(s.devices, t.devices))
        latency = s.latency_s + t.latency_s + local * share_of_step
        if tree.op is Op.TURNS:
            latency += swap_s + swap_t
        else:
            memory, swap = s.memory + t.memory, swap_s + swap_t
        interval = latency
    if memory > 1.0:
        raise PlanError(
            f"{' and '.join((*s.nodes, *t.nodes))} do not fit into a device together ({memory:.0%}): "
            "let them take turns"
        )
    made = replace(tree, halves=(s, t), nodes=tuple(problem.graph.names_in(problem.graph.mask((*s.nodes, *t.nodes)))),
                   devices=devices, latency_s=latency, interval_s=interval, memory=memory)  # fmt: skip
    return made, swap


def _stage(problem: Problem, tree: Tree, pace: float) -> tuple[Tree, float]:
    batch = problem.graph.batch
    whole, half, steady, memory, swap, rounds = [], [], [], [], [], 1
    devices = np.zeros((len(tree.seats), len(problem.pools)), np.int64)
    for row, seat in enumerate(tree.seats):
        cost, option, pool = seat_of(problem, seat)
        replicas = np.array([seat.replicas])
        latency, interval = call_seconds(cost, option, tree.chunk, batch, replicas, pace)
        whole.append(float(latency[0]))
        steady.append(float(interval[0]))
        half.append(2 * float(call_seconds(cost, option, -(-tree.chunk // 2), batch, replicas)[0][0]))
        memory.append(float(memory_share(cost, option, pool, tree.chunk, batch, replicas)[0]))
        swap.append(option.swap_s)
        rounds = max(rounds, cost.rounds)
        devices[row, problem.pools.index(pool)] = seat.devices
        if memory[-1] > 1.0:
            raise PlanError(
                f"{seat.worker} fills {memory[-1]:.0%} of a {pool.kind} device on {seat.devices} devices: give it more"
            )
    if len(tree.seats) == 1:
        seconds, interval_s, used, swap_s = whole[0], steady[0], memory[0], swap[0]
    elif tree.is_apart:
        slowest = max(half)
        seconds = min(sum(whole), slowest + (sum(half) - slowest) / (2 * rounds))
        interval_s, used, swap_s = seconds, max(memory), max(swap)
    elif sum(memory) <= 1.0:
        seconds, used, swap_s = sum(whole), sum(memory), sum(swap)
        interval_s = seconds
    else:
        seconds, used, swap_s = sum(whole) + swaps_in_cycle(problem, tree), max(memory), max(swap)
        interval_s = seconds
    taken = devices.sum(axis=0) if tree.is_apart else devices.max(axis=0)
    made = replace(
        tree, devices=tuple(int(n) for n in taken), latency_s=seconds, interval_s=interval_s, memory=used
    )
    return made, swap_s
