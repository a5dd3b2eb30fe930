"""A run switches plans when it pays, and for nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import RunError
from rill.planning.cost import Problem
from rill.planning.graph import Edge
from rill.planning.plan import Plan
from rill.planning.price import price, stage_seconds
from rill.planning.profile import Identity, Profile
from rill.planning.replan import Policy, Replanner, decide
from rill.planning.search import Tree, search
from rill.runtime.hub.history import CallRecord
from rill.workflows.config import FlowConfig
from tests.planning.test_search import three


def predicted(problem: Problem, tree: Tree) -> dict[str, float]:
    return {s.nodes[0]: stage_seconds(problem, s) for s in price(problem, tree).tree.stages()}


def drifted(problem: Problem, worker: str, factor: float) -> Problem:
    cost = problem.workers[worker]
    options = tuple(replace(o, work_s=o.work_s.scaled(factor)) for o in cost.options)
    return replace(problem, workers={**problem.workers, worker: replace(cost, options=options)})


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.3))
def test_noise_moves_nothing(seed: int, noise: float) -> None:
    """As long as the median of the window stays within what the policy calls a drift."""
    problem = three(16, swap_s=0.3)
    tree = search(problem).tree
    draw = np.random.default_rng(seed)
    observed = {
        name: list(seconds * np.clip(draw.normal(1.0, noise, 12), 0.2, 3.0))
        for name, seconds in predicted(problem, tree).items()
    }
    policy = Policy(window=8)
    decision = decide(problem, tree, observed, steps_left=1000, policy=policy)
    assert decision.found is None, decision.reason


@settings(max_examples=8, deadline=None)
@given(factor=st.floats(2.5, 6.0), worker=st.sampled_from(["rollout", "actor"]), seed=st.integers(0, 1000))
def test_a_planted_drift_moves_and_wins_back_most_of_what_was_lost(
    factor: float, worker: str, seed: int
) -> None:
    problem = three(16, swap_s=20.0)  # dear swaps: workers are apart, and shares of devices matter
    tree = search(problem).tree
    world = drifted(problem, worker, factor)
    draw = np.random.default_rng(seed)
    observed = {
        name: list(seconds * draw.normal(1.0, 0.02, 5)) for name, seconds in predicted(world, tree).items()
    }
    kept_s, best_s = price(world, tree).step_s, search(world).step_s
    decision = decide(problem, tree, observed, steps_left=500, switch_s=30.0)
    if kept_s < 1.07 * best_s:
        return  # there is nothing to win
    assert decision.found is not None, decision.reason
    moved_s = price(world, decision.found.tree).step_s
    assert (kept_s - moved_s) >= 0.8 * (kept_s - best_s)
    assert worker in decision.reason


def test_a_cycle_drifts_as_its_members_do() -> None:
    """PPO's actor, reference and critic are a cycle, and one node of the plan."""
    problem = three(2)
    back = Edge(source="actor", target="reference")
    circle = replace(problem.graph, edges=(*problem.graph.edges, back)).collapsed()
    problem = replace(problem, graph=circle)
    tree = search(problem).tree
    (name,) = (node.name for node in circle.nodes if node.members)
    seconds = predicted(problem, tree)[name]
    assert not next(stage for stage in tree.stages() if stage.nodes[0] == name).is_apart
    shares = {"reference": 0.2 * seconds, "actor": 0.8 * seconds}
    same = decide(problem, tree, {n: [s] * 5 for n, s in shares.items()}, steps_left=100)
    assert same.reason == "no worker has drifted"
    thrice = decide(problem, tree, {n: [3.0 * s] * 5 for n, s in shares.items()}, steps_left=100)
    assert f"{name} takes 3.00 × the predicted time" in thrice.reason


def test_a_switch_that_cannot_be_earned_back_is_not_made() -> None:
    problem = three(16, swap_s=20.0)
    tree = search(problem).tree
    seen = predicted(drifted(problem, "actor", 5.0), tree)
    observed = {name: [seconds] * 4 for name, seconds in seen.items()}
    assert decide(problem, tree, observed, steps_left=500).found is not None
    late = decide(problem, tree, observed, steps_left=2, switch_s=1e4)
    assert late.found is None
    assert "too few" in late.reason


def test_right_after_a_switch_there_is_no_other() -> None:
    problem = three(16, swap_s=20.0)
    tree = search(problem).tree
    observed = {n: [s] * 4 for n, s in predicted(drifted(problem, "actor", 5.0), tree).items()}
    assert decide(problem, tree, observed, steps_left=500, steps_since_switch=2).found is None


def test_after_a_switch_the_new_times_are_the_predicted_ones() -> None:
    problem = three(16, swap_s=20.0)
    tree = search(problem).tree
    world = drifted(problem, "actor", 5.0)
    observed = {n: [s] * 4 for n, s in predicted(world, tree).items()}
    first = decide(problem, tree, observed, steps_left=500)
    assert first.found is not None
    observed = {n: [s] * 4 for n, s in predicted(world, first.found.tree).items()}
    assert decide(first.problem, first.found.tree, observed, steps_left=500).found is None


class Refusing:
    """A steering whose groups do not come up anywhere else."""

    num_asked = 0

    def history(self, since_s: float = 0.0) -> list[CallRecord]:
        return []

    def switch(self, *_: object, **__: object) -> float:
        self.num_asked += 1
        raise RunError("no room there")


def test_a_switch_that_failed_is_said_to_have_gained_nothing(caplog: pytest.LogCaptureFixture) -> None:
    problem = three(16, swap_s=20.0)
    found = search(problem)
    profile = Profile(identity=Identity(model="", machine="", version=""), workers={})
    config = SimpleNamespace(flow=FlowConfig())
    replanner = Replanner(config, Plan.of(problem, found), profile, problem, found.tree)
    seen = predicted(drifted(problem, "actor", 5.0), found.tree)
    replanner._observed = {name: [seconds] * 4 for name, seconds in seen.items()}
    replanner._steps_s = [10.0] * 4
    steering = Refusing()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 10):
            report = SimpleNamespace(step=step, num_steps=500, metrics={"time/step_s": 10.0})
            replanner.after_step(steering, report)  # type: ignore[arg-type]
    assert steering.num_asked > 0
    assert {record.getMessage() for record in caplog.records} == {
        "replanning: the switch failed, the run goes on as before: no room there"
    }
