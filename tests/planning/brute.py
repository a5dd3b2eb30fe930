"""Every plan there is, one by one: what the search is held against. Plain Python, no pruning, all bracketings."""

from __future__ import annotations

import math

import numpy as np

from rill.planning.cost import Problem, call_seconds, is_stream, memory_share
from rill.planning.search import Mode

Way = tuple[tuple[int, ...], float, float, float, float, int]
"""Devices of each kind, latency, interval, memory, swap, and 1 for sharing + 2 for splitting."""


def best_step_s(problem: Problem, mode: Mode = Mode.AUTO) -> float:
    ways = _Brute(problem).ways(problem.graph.everything, problem.graph.batch)
    allowed = {
        Mode.AUTO: (0, 1, 2, 3),
        Mode.SHARED: (0, 1),
        Mode.SPLIT: (0, 2),
        Mode.HYBRID: (3,),
    }[mode]
    return min(
        (
            max(i if problem.lag else f, f / (problem.lag + 1))
            for _, f, i, _, _, mix in ways
            if mix in allowed
        ),
        default=math.inf,
    )


class _Brute:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.memo: dict[tuple[int, int], set[Way]] = {}

    def ways(self, part: int, chunk: int) -> set[Way]:
        if (part, chunk) not in self.memo:
            found: set[Way] = set()
            if part.bit_count() == 1:
                found |= self.stage(part.bit_length() - 1, chunk)
            for first in range(1, part):
                if first & ~part == 0 and self.is_cut(first, part & ~first):
                    found |= self.pairs(first, part & ~first, chunk)
            for smaller in self.problem.levels:
                if smaller < chunk and chunk % smaller == 0:
                    k = chunk // smaller
                    found |= {
                        (n, f + (k - 1) * i, k * i, m, s, x) for n, f, i, m, s, x in self.ways(part, smaller)
                    }
            self.memo[part, chunk] = {_rounded(way) for way in found}
        return self.memo[part, chunk]

    def is_cut(self, first: int, second: int) -> bool:
        parents = self.problem.graph.parents
        return not any(parents[i] & second for i in range(len(parents)) if first >> i & 1)

    def stage(self, index: int, chunk: int) -> set[Way]:
        problem = self.problem
        cost = problem.workers[problem.graph.nodes[index].name]
        found: set[Way] = set()
        for option in cost.options:
            for kind, pool in enumerate(problem.pools):
                for replicas in range(1, pool.count // option.parallel + 1):
                    if pool.kind != option.kind:
                        continue
                    r = np.array([replicas])
                    memory = float(memory_share(cost, option, pool, chunk, problem.graph.batch, r)[0])
                    devices = tuple(
                        replicas * option.parallel if k == kind else 0 for k in range(len(problem.pools))
                    )
                    for pace in problem.paces if is_stream(cost, chunk, problem.graph.batch) else (1.0,):
                        latency, interval = call_seconds(cost, option, chunk, problem.graph.batch, r, pace)
                        if memory <= 1:
                            found.add(
                                (devices, float(latency[0]), float(interval[0]), memory, option.swap_s, 0)
                            )
        return found

    def pairs(self, first: int, second: int, chunk: int) -> set[Way]:
        problem, graph = self.problem, self.problem.graph
        index = {node.name: i for i, node in enumerate(graph.nodes)}

        def side(name: str) -> int:
            return 0 if first >> index[name] & 1 else 1 if second >> index[name] & 1 else 2

        moved = [e.bytes_per_item * chunk / problem.link_bytes_per_s for e in graph.edges
                 if (side(e.source), side(e.target)) == (0, 1)]  # fmt: skip
        weights = sum(s.bytes for s in graph.syncs if {side(s.source), side(s.target)} == {0, 1})
        apart, local = weights / problem.link_bytes_per_s, weights / problem.local_bytes_per_s
        part_of_step = chunk / graph.batch
        streams = any(problem.workers[n].streams for n in graph.names_in(first | second))
        found: set[Way] = set()
        for n_s, f_s, i_s, m_s, s_s, x_s in self.ways(first, chunk):
            for n_t, f_t, i_t, m_t, s_t, x_t in self.ways(second, chunk):
                total = tuple(a + b for a, b in zip(n_s, n_t))
                if all(n <= pool.count for n, pool in zip(total, problem.pools)):
                    passed = f_s + f_t if moved or apart else max(f_s, f_t)
                    interval = max([i_s, i_t, *moved, apart * part_of_step])
                    found.add(
                        (
                            total,
                            passed + sum(moved) + apart,
                            interval,
                            max(m_s, m_t),
                            max(s_s, s_t),
                            x_s | x_t | 2,
                        )
                    )
                if chunk < graph.batch and streams:
                    continue
                same = tuple(max(a, b) for a, b in zip(n_s, n_t))
                f = f_s + f_t + local * part_of_step
                turns = f + s_s + s_t
                if not (problem.lag and streams):  # an engine that runs ahead never lets go
                    found.add((same, turns, turns, max(m_s, m_t), 0.0, x_s | x_t | 1))
                if m_s + m_t <= 1:
                    found.add((same, f, f, m_s + m_t, s_s + s_t, x_s | x_t | 1))
        return found


def _rounded(way: Way) -> Way:
    devices, *figures, mix = way
    return (devices, *(round(x, 9) for x in figures), mix)  # type: ignore[return-value]
