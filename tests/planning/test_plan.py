"""A plan is a file: it says what the search found, survives editing, and contradictions in it are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import PlanError
from rill.planning.plan import Placed, Plan, choose, ids_text, parse_ids
from rill.planning.price import price
from rill.planning.recipe import values_of
from rill.planning.search import Mode, best_of_modes, search
from tests.planning.test_search import problems, three


@settings(max_examples=60, deadline=None)
@given(problem=problems(), mode=st.sampled_from(Mode))
def test_every_plan_that_can_be_found_can_be_written_read_and_priced(problem: object, mode: Mode) -> None:
    try:
        found = search(problem, mode)  # type: ignore[arg-type]
    except PlanError:
        return
    plan = Plan.of(problem, found)  # type: ignore[arg-type]
    plan.validate()
    again = price(problem, plan.tree(problem.graph))  # type: ignore[attr-defined, arg-type]
    assert again.step_s == pytest.approx(plan.step_s) == pytest.approx(found.step_s)
    for name, placed in plan.workers.items():
        for other in placed.shares_with:
            assert set(placed.ids) & set(plan.workers[other].ids), name


def test_a_plan_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    problem = three()
    best = search(problem)
    plan = Plan.of(
        problem,
        best,
        others=[o for o in best_of_modes(problem).items() if o[0] is not best.tree.mode],
        basis={"rollout": "two runs"},
        notes=("mind",),
    )
    (tmp_path / "plan.toml").write_text(plan.dumps())
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert "longer" in plan.rejected["split"]
    assert plan.workers["rollout"].basis == "two runs"


@pytest.mark.parametrize(
    ("structure", "staying"),
    [
        ("turns(rollout, together(reference, actor))", ("actor", "reference")),
        ("together(rollout, together(reference, actor))", ("actor", "reference", "rollout")),
        ("turns(rollout, turns(reference, actor))", ()),
    ],
)
def test_those_that_are_in_memory_together_are_told_to_stay(structure: str, staying: tuple[str, ...]) -> None:
    placed = Placed(devices="0", kind="gpu", chunk=8)
    workers = dict.fromkeys(("rollout", "reference", "actor"), placed)
    plan = Plan(structure=structure, mode="shared", batch=8, devices={"gpu": 1}, workers=workers)
    plan.validate()
    assert plan.staying == staying
    assert values_of(plan)["cluster.colocate"] == list(staying)
    assert ("stay" in plan.signature) == bool(staying)


def test_pinned_ids_are_the_ids_of_the_plan() -> None:
    pins = {"rollout": (2, 3, 6), "actor": (0, 7)}
    plan = Plan.of(three(pins=pins), search(three(pins=pins)))
    assert plan.workers["rollout"].ids == (2, 3, 6)
    assert plan.workers["actor"].ids == (0, 7)
    plan.validate()


def test_the_granularity_of_an_edge_is_what_its_target_takes() -> None:
    found = search(three(), Mode.SPLIT)
    plan = Plan.of(three(), found)
    assert set(plan.edges) == {"rollout -> reference", "reference -> actor"}
    assert all(64 % chunk == 0 and chunk < 64 for chunk in plan.edges.values())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("turns(", "spins(", "spins.* is no worker and none of"),
        ("turns(", "turns((", "cannot be read"),
        ('devices = "0-7"', 'devices = ""', "no device"),
        ('devices = "0-7"', 'devices = "0-8"', "counted from 0"),
        ('devices = "0-7"', 'devices = "a-b"', "cannot be read"),
        ("rollout", "rolout", "the structure runs|cannot read|no devices"),
        ("chunk = 64", "chunk = 5", "do not divide the batch"),
    ],
)
def test_a_contradiction_is_named(old: str, new: str, words: str, tmp_path: Path) -> None:
    text = Plan.of(three(), search(three(), Mode.SHARED)).dumps()
    assert old in text
    (tmp_path / "plan.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError, match=words):
        Plan.load(tmp_path / "plan.toml")


def test_workers_that_are_apart_may_not_have_devices_in_common(tmp_path: Path) -> None:
    plan = Plan.of(three(), search(three(), Mode.SPLIT))
    text = plan.dumps().replace(f'devices = "{plan.workers["actor"].devices}"', 'devices = "0"')
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match="apart in the structure"):
        Plan.load(tmp_path / "plan.toml")


def test_a_plan_for_more_devices_than_there_are_is_refused() -> None:
    plan = Plan.of(three(8), search(three(8), Mode.SHARED))
    with pytest.raises(PlanError, match="8 gpu devices, there are 4"):
        price(three(4), plan.tree(three(4).graph))


@given(st.sets(st.integers(0, 40)))
def test_ids_are_read_as_they_are_written(ids: set[int]) -> None:
    assert set(parse_ids(ids_text(ids))) == ids


def test_a_device_that_is_named_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="'0-3,2' names device 2 twice"):
        parse_ids("0-3,2")


def test_what_was_tried_counts_more_than_what_was_predicted() -> None:
    problem = three()
    predicted, found = choose(problem)
    slower = {predicted.signature: 100 * found.step_s}
    other, _ = choose(problem, tried=slower)
    assert other.signature != predicted.signature and other.mode != predicted.mode
    assert f"{100 * found.step_s:.4g} s" in other.rejected[predicted.mode]
    again, measured = choose(problem, tried={predicted.signature: found.step_s / 2})
    assert again.signature == predicted.signature and again.step_s == measured.step_s == found.step_s / 2
    assert any("tried" in note for note in again.notes)
