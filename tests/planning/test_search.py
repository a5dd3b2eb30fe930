"""The search finds the best of all plans, obeys what is pinned, and says why there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import PlanError
from rill.planning import cost
from rill.planning.cost import Option, Pool, Problem, WorkerCost
from rill.planning.fit import Curve, constant, line
from rill.planning.frontier import Op
from rill.planning.graph import Edge, Graph, Node, Sync
from rill.planning.price import price
from rill.planning.search import Mode, best_of_modes, search
from tests.planning.brute import best_step_s


@pytest.fixture(autouse=True, scope="module")
def _few_paces() -> Iterator[None]:
    """Trying every plan takes long where a stream has many paces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "PACES", (0.5, 1.0, 2.0))
        yield


seconds = st.floats(0.0, 4.0).map(lambda x: round(x, 2))


@st.composite
def problems(draw: st.DrawFn, least: int = 1, most: int = 3) -> Problem:
    num = draw(st.integers(least, most))
    names = "abcd"[:num]
    possible = list(itertools.combinations(names, 2))
    edges = [
        Edge(source=s, target=t, bytes_per_item=draw(seconds)) for s, t in possible if draw(st.booleans())
    ]
    syncs = (
        [Sync(source=names[-1], target=names[0], bytes=draw(seconds))]
        if num > 1 and draw(st.booleans())
        else []
    )
    kinds = draw(st.sampled_from([(("gpu", 4),), (("gpu", 3),), (("gpu", 2), ("cpu", 2))]))
    workers = {}
    for name in names:
        first_size = draw(st.sampled_from([1, 1, 2]))
        options = tuple(
            Option(
                kind=draw(st.sampled_from([kind for kind, _ in kinds])) if number else kinds[0][0],
                parallel=first_size if number == 0 else 3 - first_size,
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
        graph=Graph(
            nodes=tuple(Node(name=n) for n in names), edges=tuple(edges), syncs=tuple(syncs), batch=8
        ),
        workers=workers,
        pools=tuple(
            Pool(kind=k, count=n, memory_bytes=1.0, link_bytes_per_s=4.0, local_bytes_per_s=16.0)
            for k, n in kinds
        ),
        chunks=draw(st.sampled_from([(8,), (8, 4), (8, 2), (8, 4, 2), (8, 4, 1)])),
        lag=draw(st.sampled_from([0, 0, 1, 2])),
    )


@settings(max_examples=60, deadline=None)
@given(problem=problems(), mode=st.sampled_from(Mode))
def test_the_search_finds_what_trying_every_plan_finds(problem: Problem, mode: Mode) -> None:
    best = best_step_s(problem, mode)
    if math.isinf(best):
        with pytest.raises(PlanError):
            search(problem, mode)
    else:
        assert search(problem, mode).step_s == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(max_examples=300, deadline=None)
@given(problem=st.one_of(problems(), problems(4, 4)), mode=st.sampled_from(Mode))
def test_the_search_finds_what_trying_every_plan_finds_many_times(problem: Problem, mode: Mode) -> None:
    best = best_step_s(problem, mode)
    if not math.isinf(best):
        assert search(problem, mode).step_s == pytest.approx(best, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), mode=st.sampled_from(Mode))
def test_the_price_of_a_found_plan_is_what_the_search_said(problem: Problem, mode: Mode) -> None:
    try:
        found = search(problem, mode)
    except PlanError:
        return
    num_streams = sum(worker.streams for worker in problem.workers.values())
    priced = price(problem, found.tree).step_s
    if num_streams <= 1:  # several streams may have been given paces of their own
        assert priced == pytest.approx(found.step_s)
    else:
        assert priced >= found.step_s - 1e-9


def three(
    devices: int = 8,
    *,
    slow: float = 1.0,
    memory: float = 0.6,
    lag: int = 0,
    pins: dict[str, tuple[int, ...]] | None = None,
    swap_s: float = 1.0,
) -> Problem:
    """rollout → reference → actor; two of them never fit together unless `memory` is small."""
    names = ("rollout", "reference", "actor")
    work = {"rollout": line(2.0, slow), "reference": line(0.1, 0.1), "actor": line(0.2, 0.4)}
    return Problem(
        graph=Graph(
            nodes=tuple(Node(name=n) for n in names),
            edges=(Edge(source="rollout", target="reference"), Edge(source="reference", target="actor")),
            syncs=(Sync(source="actor", target="rollout", bytes=1e9),),
            batch=64,
        ),
        workers={
            n: WorkerCost(
                options=(Option(kind="gpu", work_s=work[n], memory_bytes=constant(memory), swap_s=swap_s),)
            )
            for n in names
        },
        pools=(
            Pool(kind="gpu", count=devices, memory_bytes=1.0, link_bytes_per_s=1e10, local_bytes_per_s=1e12),
        ),
        lag=lag,
        pins=pins or {},
    )


def streaming(problem: Problem) -> Problem:
    rollout = replace(problem.workers["rollout"], streams=True)
    return replace(problem, workers={**problem.workers, "rollout": rollout})


def test_workers_that_fit_together_pay_for_no_swap() -> None:
    assert Op.TURNS not in search(three(memory=0.2), Mode.SHARED).tree.ops()
    assert Op.TOGETHER not in search(three(memory=0.6), Mode.SHARED).tree.ops()


def test_dear_swaps_drive_workers_apart() -> None:
    assert search(three(swap_s=0.0)).tree.mode is Mode.SHARED
    assert search(three(swap_s=100.0)).tree.mode is Mode.SPLIT


def test_a_lag_lets_the_slower_side_set_the_pace() -> None:
    """With batches enough under way, a step is an interval: what the slowest stage needs for a batch."""
    found = search(three(lag=8), Mode.SPLIT)
    slowest = max(stage.interval_s * 64 / stage.chunk for stage in found.tree.stages())
    assert found.step_s == pytest.approx(slowest)
    assert found.step_s < search(three(lag=0), Mode.SPLIT).step_s


def test_devices_of_another_kind_are_used_where_they_are_worth_it() -> None:
    problem = three()
    fast = Option(kind="fast", work_s=line(1.0, 0.2), memory_bytes=constant(0.6), swap_s=1.0)
    workers = dict(problem.workers)
    workers["rollout"] = WorkerCost(options=(*workers["rollout"].options, fast))
    pools = (*problem.pools, Pool(kind="fast", count=4, memory_bytes=1.0))
    mixed = Problem(graph=problem.graph, workers=workers, pools=pools)
    found = search(mixed)
    assert {seat.kind for stage in found.tree.stages() for seat in stage.seats} == {"gpu", "fast"}
    assert found.step_s < search(problem).step_s


def test_larger_replicas_are_taken_where_they_are_faster() -> None:
    options = (
        Option(kind="gpu", parallel=1, work_s=line(0.0, 1.0)),
        Option(kind="gpu", parallel=4, work_s=line(0.0, 0.1)),
    )
    graph = Graph(nodes=(Node(name="a"),), batch=16)
    pools = (Pool(kind="gpu", count=8),)
    found = search(Problem(graph=graph, workers={"a": WorkerCost(options=options)}, pools=pools))
    assert next(found.tree.stages()).seats[0].parallel == 4


def test_pinned_ids_decide_who_shares() -> None:
    apart = search(three(pins={"rollout": (0, 1, 2), "actor": (3, 4)}))
    assert apart.tree.mode is not Mode.SHARED
    same = search(three(swap_s=100.0, pins={"rollout": (0, 1), "actor": (0, 1)}))
    assert same.tree.mode is not Mode.SPLIT


@pytest.mark.parametrize(
    ("problem", "mode", "words"),
    [
        (lambda: three(2), Mode.SPLIT, r"at least 3 devices .* add 1"),
        (lambda: three(memory=1.5), Mode.AUTO, r"rollout does not fit: .*larger parallel size"),
        (lambda: three(pins={"actor": tuple(range(9))}), Mode.AUTO, r"actor is pinned to 9 devices"),
        (
            lambda: three(pins={"actor": (0, 1), "rollout": (1, 2)}),
            Mode.AUTO,
            r"overlap in part \(1\)",
        ),
        (lambda: three(0), Mode.AUTO, r"at least one device"),
        (lambda: streaming(three(1, lag=1)), Mode.AUTO, r"lag 1: .*Set the lag to 0.*give 2 devices or more"),
        (lambda: three(pins={"critic": (0,)}), Mode.AUTO, r"pinned critic: the workers are actor"),
    ],
)
def test_what_is_impossible_is_named_with_a_way_out(problem: object, mode: Mode, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        search(problem(), mode)  # type: ignore[operator]


def test_sharded_memory_says_how_many_devices_would_do() -> None:
    option = Option(kind="gpu", work_s=line(0.0, 1.0), sharded_bytes=10.0, memory_bytes=constant(0.5))
    graph = Graph(nodes=(Node(name="actor"),), batch=8)
    pools = (Pool(kind="gpu", count=8, memory_bytes=1.0),)
    with pytest.raises(PlanError, match="20 devices would do"):
        search(Problem(graph=graph, workers={"actor": WorkerCost(options=(option,))}, pools=pools))


def test_the_other_modes_come_with_their_plans_or_reasons() -> None:
    best = best_of_modes(three(2))
    assert isinstance(best[Mode.SPLIT], str)
    assert min(one.step_s for one in best.values() if not isinstance(one, str)) == search(three(2)).step_s


def test_more_devices_never_make_a_step_longer() -> None:
    steps = [search(three(n)).step_s for n in (1, 2, 3, 5, 8, 13, 40)]
    assert steps == sorted(steps, reverse=True)


def test_a_cycle_takes_the_best_of_together_in_turns_and_apart() -> None:
    def cycle(simulator_gb: float, swap_s: float = 0.0) -> Problem:
        graph = Graph(
            nodes=(Node(name="env"), Node(name="policy")),
            edges=(Edge(source="env", target="policy"), Edge(source="policy", target="env")),
            batch=32,
        )
        flat = Option(
            kind="gpu",
            work_s=Curve("linear", (10.0, 0.01)),
            memory_bytes=constant(simulator_gb),
            swap_s=swap_s,
        )
        steep = Option(kind="gpu", work_s=line(0.5, 1.0), memory_bytes=constant(0.5))
        workers = {
            "env": WorkerCost(options=(flat,), rounds=50),
            "policy": WorkerCost(options=(steep,), rounds=50),
        }
        pools = (Pool(kind="gpu", count=8, memory_bytes=1.0),)
        return Problem(graph=graph.collapsed(), workers=workers, pools=pools)

    assert not next(search(cycle(0.3)).tree.stages()).is_apart
    assert next(search(cycle(0.9, swap_s=1.0)).tree.stages()).is_apart
    in_turns = search(cycle(0.9, swap_s=0.001))
    assert not next(in_turns.tree.stages()).is_apart
    assert in_turns.step_s == pytest.approx(search(cycle(0.3)).step_s + 50 * 0.001)
    one_device = replace(cycle(0.9), pools=(Pool(kind="gpu", count=1, memory_bytes=1.0),))
    with pytest.raises(PlanError, match="split needs at least 2 devices"):
        search(one_device, Mode.SPLIT)
    assert price(cycle(0.9, swap_s=0.001), in_turns.tree).step_s == pytest.approx(in_turns.step_s)
