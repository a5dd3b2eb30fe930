"""The simulator agrees with the prices where nothing is drawn, and shows what prices cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rill.errors import PlanError
from rill.planning.cost import Option, Pool, Problem, WorkerCost
from rill.planning.fit import line
from rill.planning.graph import Edge, Graph, Node
from rill.planning.scaling import doublings, draw_svg, scale
from rill.planning.search import Mode, search
from rill.planning.simulator import Change, Weather, simulate
from tests.planning.test_search import three


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_without_chance_a_simulated_step_is_the_predicted_one(mode: Mode, lag: int) -> None:
    problem = replace(three(lag=lag), graph=replace(three().graph, syncs=()))
    found = search(problem, mode)
    assert simulate(problem, found.tree, steps=12).mean_step_s == pytest.approx(found.step_s, rel=0.01)


def long_tailed(devices: int, tail_s: float = 0.01) -> Problem:
    lengths = tuple(float(x) for x in np.random.default_rng(1).lognormal(4, 0.8, 2000))
    rollout = Option(kind="gpu", work_s=line(0.0, 0.5), tail_s=tail_s)
    actor = Option(kind="gpu", work_s=line(0.1, 0.3))
    return Problem(
        graph=Graph(
            nodes=(Node(name="rollout"), Node(name="actor")),
            edges=(Edge(source="rollout", target="actor"),),
            batch=256,
        ),
        workers={
            "rollout": WorkerCost(options=(rollout,), lengths=lengths, streams=True),
            "actor": WorkerCost(options=(actor,)),
        },
        pools=(Pool(kind="gpu", count=devices),),
    )


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.SPLIT])
@pytest.mark.parametrize("devices", [4, 16, 64])
def test_with_a_long_tail_the_price_stays_close_to_the_simulation(mode: Mode, devices: int) -> None:
    problem = long_tailed(devices)
    found = search(problem, mode)
    assert simulate(problem, found.tree, steps=20).mean_step_s == pytest.approx(found.step_s, rel=0.15)


def test_the_tail_does_not_shrink_with_more_devices() -> None:
    steps = [search(long_tailed(n, tail_s=0.1), Mode.SHARED).step_s for n in (64, 1024)]
    longest = max(long_tailed(1).workers["rollout"].lengths) * 0.1
    assert steps[1] > 0.5 * longest


def test_the_first_chunks_of_a_stream_hold_the_short_answers() -> None:
    problem = long_tailed(16)
    done = simulate(problem, search(problem, Mode.SPLIT).tree, steps=1)
    actor = [span.end_s - span.start_s for span in done.spans if span.node == "actor"]
    assert actor[0] < actor[-1]


def test_stragglers_failures_and_leaving_replicas_cost_time() -> None:
    problem = three()
    tree = search(problem, Mode.SPLIT).tree
    calm = simulate(problem, tree, steps=20).mean_step_s
    slow = simulate(problem, tree, steps=20, weather=Weather(slow_share=1.0, slow_factor=2.0))
    assert slow.mean_step_s > 1.5 * calm
    failing = simulate(problem, tree, steps=20, weather=Weather(failures_per_hour=20.0, repair_s=20.0))
    assert failing.num_failures > 0
    assert failing.mean_step_s > calm
    leaving = Change(at_s=0.0, worker="rollout", replicas=-2)
    assert simulate(problem, tree, steps=20, weather=Weather(changes=(leaving,))).mean_step_s > calm


def test_what_a_failed_engine_was_saying_is_said_by_the_others() -> None:
    engine = WorkerCost(options=(Option(kind="gpu", work_s=line(0.0, 1.0)),), streams=True)
    graph = Graph(nodes=(Node(name="rollout"),), batch=64)
    problem = Problem(graph=graph, workers={"rollout": engine}, pools=(Pool(kind="gpu", count=4),))
    tree = search(problem).tree
    failing = simulate(problem, tree, steps=1, weather=Weather(failures_per_hour=100.0, repair_s=0.0))
    assert failing.num_failures > 0
    assert failing.mean_step_s > simulate(problem, tree, steps=1).mean_step_s


def test_replicas_that_join_help_the_slowest_stage() -> None:
    problem = three()
    tree = search(problem, Mode.SPLIT).tree
    joining = Change(at_s=0.0, worker="rollout", replicas=8)
    helped = simulate(problem, tree, steps=10, weather=Weather(changes=(joining,)))
    assert helped.mean_step_s < simulate(problem, tree, steps=10).mean_step_s


def test_all_replicas_gone_for_good_is_an_error_and_not_a_hang() -> None:
    problem = three()
    gone = Change(at_s=0.0, worker="actor", replicas=-100)
    with pytest.raises(PlanError, match="stands still"):
        simulate(problem, search(problem, Mode.SPLIT).tree, weather=Weather(changes=(gone,)))


def test_the_same_seed_gives_the_same_run() -> None:
    problem = long_tailed(8)
    tree = search(problem).tree
    weather = Weather(failures_per_hour=5.0, jitter=0.1)
    assert simulate(problem, tree, seed=3, weather=weather) == simulate(
        problem, tree, seed=3, weather=weather
    )
    assert simulate(problem, tree, seed=3).step_s != simulate(problem, tree, seed=4).step_s


def test_no_stage_works_on_shared_devices_during_anothers_turn() -> None:
    problem = three()
    done = simulate(problem, search(problem, Mode.SHARED).tree, steps=3)
    spans = sorted((span.start_s, span.end_s) for span in done.spans)
    assert all(start >= end - 1e-9 for (_, end), (start, _) in zip(spans, spans[1:]))


def test_a_hundred_thousand_devices_are_no_trouble() -> None:
    problem = replace(three(100_000), graph=replace(three().graph, batch=200_000))
    tree = search(problem, Mode.SHARED).tree
    assert simulate(problem, tree, steps=2).mean_step_s > 0


def test_scaling_finds_the_knee_and_draws_it() -> None:
    scaling = scale(long_tailed(64, tail_s=0.02), doublings(2, 64), steps=2)
    assert [size.devices for size in scaling.sizes] == [2, 4, 8, 16, 32, 64]
    assert 2 < scaling.knee < 64
    efficiencies = [scaling.efficiency(size) for size in scaling.sizes]
    assert efficiencies[0] == 1.0
    assert efficiencies[-1] < 0.7
    picture = draw_svg(scaling, "test")
    assert picture.startswith("<svg")
    assert picture.count("<circle") == 6


def test_sizes_without_a_plan_are_listed_with_the_reason() -> None:
    scaling = scale(three(8), [2, 8], mode=Mode.SPLIT, steps=1)
    assert "at least 3 devices" in scaling.sizes[0].why_not
    with pytest.raises(PlanError, match="no size"):
        scale(three(8), [1, 2], mode=Mode.SPLIT)
