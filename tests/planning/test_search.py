"""The search finds the best of all plans, obeys what is pinned, and says why there is none."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import PlanError
from rill.planning.cost import Option, Pin, Pool, Problem, WorkerCost
from rill.planning.fit import Curve, constant, line
from rill.planning.frontier import Op
from rill.planning.graph import Edge, Graph, Node, Sync
from rill.planning.search import Mode, alternatives, search
from tests.planning.brute import best_step_s

seconds = st.floats(0.0, 4.0).map(lambda x: round(x, 2))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num = draw(st.integers(1, 3))
    names = "abcd"[:num]
    possible = list(itertools.combinations(names, 2))
    edges = [Edge(source=s, target=t, bytes_per_item=draw(seconds)) for s, t in possible if draw(st.booleans())]
    syncs = [Sync(source=names[-1], target=names[0], bytes=draw(seconds))] if num > 1 and draw(st.booleans()) else []
    kinds = draw(st.sampled_from([(("gpu", 4),), (("gpu", 3),), (("gpu", 2), ("cpu", 2))]))
    workers = {}
    for name in names:
        options = tuple(
            Option(
                kind=draw(st.sampled_from([kind for kind, _ in kinds])) if number else kinds[0][0],
                parallel=draw(st.sampled_from([1, 1, 2])),
                work_s=line(draw(seconds), draw(seconds)),
                replica_exponent=draw(st.sampled_from([0.0, 0.2])),
                tail_s=draw(seconds) / 10,
                step_s=draw(seconds),
                memory_bytes=line(draw(st.sampled_from([0.1, 0.4, 0.7])), draw(st.sampled_from([0.0, 0.05]))),
                swap_s=draw(seconds),
            )
            for number in range(draw(st.integers(1, 2)))
        )
        has_lengths = draw(st.booleans())
        workers[name] = WorkerCost(
            options=options,
            lengths=(1.0, 2.0, 2.0, 7.0) if has_lengths else (),
            streams=draw(st.booleans()),
            concurrency=draw(st.sampled_from([0, 2])),
        )
    return Problem(
        graph=Graph(nodes=tuple(Node(name=n) for n in names), edges=tuple(edges), syncs=tuple(syncs), batch=8),
        workers=workers,
        pools=tuple(
            Pool(kind=k, count=n, memory_bytes=1.0, link_bytes_per_s=4.0, local_bytes_per_s=16.0) for k, n in kinds
        ),
        chunks=draw(st.sampled_from([(8,), (8, 4), (8, 2), (8, 4, 2), (8, 4, 1)])),
        lag=draw(st.sampled_from([0, 0, 1, 2])),
    )


@settings(max_examples=150, deadline=None)
@given(problem=problems(), mode=st.sampled_from(Mode))
def test_the_search_finds_what_trying_every_plan_finds(problem: Problem, mode: Mode) -> None:
    best = best_step_s(problem, mode)
    if math.isinf(best):
        with pytest.raises(PlanError):
            search(problem, mode)
    else:
        assert search(problem, mode).step_s == pytest.approx(best, abs=1e-6)
