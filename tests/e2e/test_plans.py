"""Plans drive real runs: measured, found, written into the recipe, followed, changed while the run goes on."""

from __future__ import annotations

import json
import logging
import os
import signal
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.errors import PlanError
from rill.planning.pilot import Pilot, Report, Steering
from rill.planning.plan import Plan
from rill.planning.profile import Points, Profile, WorkerProfile
from rill.planning.profiler import find_profile, schedule
from rill.planning.recipe import (
    check_follows,
    devices_of,
    identity_of,
    leave_in,
    placement_of,
    problem_of,
    put_into,
    values_of,
)
from rill.planning.replan import Policy, Replanner
from rill.planning.search import Mode, search
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.config import FlowConfig
from rill.workflows.launch import Launcher
from rill.workflows.loop import StepReport
from rill.workflows.rl_config import RLConfig
from tests.e2e.test_sft import assert_near
from tests.e2e.tiny import CORRECTED, INVARIANT, RECIPE, fingerprint, resolved, resume, start

THREE = ("cluster.devices=3", "algorithm.kl.coefficient=0.05", "loop.order=admission", INVARIANT, CORRECTED)
"""rollout, reference and actor on three slots."""
GRAPH = {
    "batch": 4,
    "nodes": ["rollout", "reference", "actor"],
    "edges": {"rollout -> reference": 1e3, "reference -> actor": 1e3},
    "syncs": {"actor -> rollout": 0.0},
}


def profile(config: RLConfig, seconds: dict[str, float], swap_s: float = 0.0, smallest: int = 1) -> Profile:
    """Workers that take so long for a prompt, and to leave their devices."""
    workers = {
        name: WorkerProfile(
            options={
                "cpu1": Points(
                    kind="cpu", items=tuple(smallest * n for n in (1.0, 2.0, 4.0)), replicas=(1, 1, 1),
                    seconds=tuple(smallest * s * n for n in (1, 2, 4)), onload_s=swap_s,
                )
            },
            streams=name == "rollout",
            lengths=(6.0, 8.0, 12.0) if name == "rollout" else (),
        )
        for name, s in seconds.items()
    }  # fmt: skip
    identity = identity_of(config, 3, "the test")
    return Profile(identity=identity, workers=workers, graph=GRAPH)


def recipe_with(plan: Plan, *overrides: str) -> tuple[RLConfig, dict[str, str]]:
    values = load_recipe(RECIPE, list(overrides))
    put_into(values.values, values.provenance, plan, "plan auto")
    config = resolve(recipe_schema(values.values), values.values, values.provenance)
    assert isinstance(config, RLConfig)
    return config, values.provenance


# --- what a plan writes -----------------------------------------------------------------------------------


def test_what_the_recipe_places_itself_is_pinned_and_stays() -> None:
    values = load_recipe(RECIPE, [*THREE, "placement.actor=2", "flow.granularity=2"])
    config = resolved(RECIPE, [*THREE, "placement.actor=2", "flow.granularity=2"])
    problem = problem_of(
        config,
        values.provenance,
        profile(config, {"rollout": 1.0, "reference": 0.2, "actor": 0.5}),
        devices_of(config),
    )
    assert problem.pins["actor"] == (2,) and "rollout" not in problem.pins
    assert problem.levels == (4, 2)
    plan = Plan.of(problem, search(problem))
    assert plan.workers["actor"].pinned
    kept = put_into(values.values, values.provenance, plan, "plan auto")
    assert len(kept) == 2 and "placement.actor is the recipe's own" in kept[0]
    assert values.values["placement"]["actor"] == 2
    assert values.provenance["placement.rollout"] == "plan auto"


def test_a_plan_of_another_recipe_machine_or_batch_is_refused() -> None:
    config = resolved(RECIPE, THREE)
    problem = problem_of(
        config, {}, profile(config, {"rollout": 1.0, "reference": 1.0, "actor": 1.0}), devices_of(config)
    )
    plan = Plan.of(problem, search(problem, Mode.SPLIT))
    check_follows(plan, config)
    for overrides, says in (
        (["cluster.devices=2"], "is for 3 devices, there are 2"),
        (["cluster.devices=3", "loop.prompts_per_step=8"], "for 4 prompts a step, the recipe has 8"),
    ):
        other = resolved(RECIPE, overrides)
        with pytest.raises(Exception, match=says):
            check_follows(plan, other)


def test_engines_that_span_two_devices_are_placed_two_by_two() -> None:
    spread = ["cluster.devices=5", "algorithm.kl.coefficient=0.05", "rollout.engine.tensor_parallel_size=2"]
    config = resolved(RECIPE, spread)
    known = profile(config, {"rollout": 1.0, "reference": 0.1, "actor": 0.5})
    with pytest.raises(PlanError, match=r"a replica of rollout has 2 devices .*tensor_parallel_size.*\[1\]"):
        problem_of(config, {}, known, devices_of(config))
    points = msgspec.structs.replace(known.workers["rollout"].options["cpu1"], parallel=2)
    workers = known.workers | {"rollout": WorkerProfile(options={"cpu2": points}, streams=True)}
    problem = problem_of(config, {}, msgspec.structs.replace(known, workers=workers), devices_of(config))
    shared, split = (Plan.of(problem, search(problem, mode)) for mode in (Mode.SHARED, Mode.SPLIT))
    placed, _ = recipe_with(shared, *spread)
    assert (placed.placement.rollout, placed.placement.actor) == ("0-3:0-1", "0-3")
    assert recipe_with(split, *spread)[0].placement.rollout == "0-1:0"
    check_follows(split, config)
    with pytest.raises(PlanError, match="2 devices to a replica of rollout, the recipe has 1"):
        check_follows(split, resolved(RECIPE, spread[:2]))
    counts = {trial.num_devices for trial in schedule(32, 8, 1, fewest=4)}
    assert counts == {8, 4}


def test_a_profile_visits_all_devices_first_and_every_size_on_each() -> None:
    trials = schedule(32, 8, 1)
    counts = [trial.num_devices for trial in trials]
    assert counts == sorted(counts, reverse=True) and set(counts) == {8, 3, 1}
    assert {trial.num_prompts for trial in trials if trial.num_devices == 1} == {8, 16, 32}
    assert all(trial.num_prompts >= trial.num_devices for trial in trials)
    cut = [trial for trial in schedule(32, 8, 1, smallest_chunk=2) if trial.chunk]
    assert [(trial.num_devices, trial.num_prompts, trial.chunk) for trial in cut] == [
        (8, 32, 8),
        (3, 32, 3),
        (1, 32, 2),
    ]


def test_no_plan_has_chunks_smaller_than_were_measured() -> None:
    config = resolved(RECIPE, [*THREE, "loop.prompts_per_step=16"])
    measured = profile(config, {"rollout": 1.0, "reference": 1.0, "actor": 1.0}, smallest=4)
    assert problem_of(config, {}, measured, devices_of(config)).levels == (16, 8, 4)


def test_a_stored_profile_of_another_shape_is_measured_again(tmp_path: Path) -> None:
    config = resolved(RECIPE, THREE)
    devices = devices_of(config)
    said: list[str] = []

    def start(config: RLConfig, run: Run, pilot: Pilot) -> None:
        raise PlanError("it is measured")

    file = tmp_path / "profiles" / f"grpo-{identity_of(config, 3, '').workload}-3xcpu.toml"
    file.parent.mkdir()
    for text in ('[identity]\nmodel = "m"\n', "\x00", "[identity]\nhardware = 'H100'\n[points]\n"):
        file.write_text(text)
        with pytest.raises(PlanError, match="it is measured"):
            find_profile(config, {}, devices, root=tmp_path, start=start, say=said.append)
    assert sum("measured again" in line for line in said) == 3, said


@pytest.mark.parametrize("file", ["plan.toml", "profile.toml"])
def test_a_run_whose_plan_or_profile_is_of_another_shape_goes_on_without_replanning(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolved(RECIPE, THREE)
    known = profile(config, {"rollout": 1.0, "reference": 0.1, "actor": 0.5})
    problem = problem_of(config, {}, known, devices_of(config))
    found = search(problem)
    plan = Plan.of(problem, found)
    followed, _ = recipe_with(plan, *THREE)
    run = Run.create("old", root=tmp_path)
    leave_in(run.path, plan, problem=problem, found=found, profile=known)
    assert Replanner.of(followed, run, devices_of(followed)) is not None
    two = devices_of(resolved(RECIPE, ["cluster.devices=2"]))
    assert Replanner.of(followed, run, two) is None, "a machine with fewer devices"
    (run.path / file).write_text("shape = 'another'\n")
    assert Replanner.of(followed, run, devices_of(followed)) is None
    assert "the run does not replan: cannot read the" in caplog.text


def test_a_session_after_a_switch_replans_on(tmp_path: Path) -> None:
    """Its recipe places groups where the plan in the run's folder has them by then."""
    config = resolved(RECIPE, THREE)
    known = profile(config, {"rollout": 1.0, "reference": 0.1, "actor": 0.5})
    problem = problem_of(config, {}, known, devices_of(config))
    found = search(problem)
    plan = Plan.of(problem, found)
    run = Run.create("switched", root=tmp_path)
    leave_in(run.path, plan, problem=problem, found=found, profile=known)
    assert Replanner.of(config, run, devices_of(config)) is None, "groups are elsewhere"
    launch = SimpleNamespace(config=config, session=SimpleNamespace(config=config))
    Launcher.settle_on(launch, placement_of(plan), config.flow)  # type: ignore[arg-type]
    assert Replanner.of(launch.config, run, devices_of(config)) is not None


# --- whole runs -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_measures_plans_and_follows_and_the_profile_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", str(RECIPE), "cluster.devices=2", "loop.steps=2", "--plan"]

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    first = said("auto", "--name", "one")
    assert "short steps on 1 device" in first and "predicted" in first
    folder = tmp_path / "runs" / "one"
    config = tomllib.loads((folder / "config.toml").read_text())
    plan = Plan.load(folder / "plan.toml")
    for key, value in values_of(plan).items():
        table, name = key.split(".")
        assert config[table][name] == value
    shown = json.loads((folder / "plan.json").read_text())
    assert {lane["name"] for lane in shown["lanes"]} == {"rollout", "actor"}
    assert (folder / "flow.json").exists()
    again = said("split", "--name", "two")
    assert "short steps" not in again, "the profile is stored"
    assert Plan.load(tmp_path / "runs" / "two" / "plan.toml").mode == "split"
    assert said(str(folder / "plan.toml"), "--name", "three")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_workflow_gives_the_same_weights_under_every_plan(tmp_path: Path) -> None:
    """Plans for workers of random speed, in every mode; one rank of each trainer, since more of them add otherwise."""
    base = resolved(RECIPE, THREE)
    draw = np.random.default_rng(0)
    plans: dict[str, Plan] = {}
    for mode in (Mode.SHARED, Mode.SPLIT, Mode.HYBRID, Mode.AUTO):
        seconds = dict(zip(("rollout", "reference", "actor"), draw.uniform(0.1, 2.0, 3)))
        problem = problem_of(base, {}, profile(base, seconds), devices_of(base))
        plan = Plan.of(problem, search(problem, mode))
        if len(plan.workers["actor"].ids) == 1:
            plans.setdefault(str(values_of(plan)), plan)
    assert len({plan.mode for plan in plans.values()}) >= 2
    runs: dict[str, list[Run]] = {}
    for number, plan in enumerate(plans.values()):
        edges = values_of(plan)["flow.edges"]
        placed = [f"placement.{name}={worker.devices}" for name, worker in plan.workers.items()]
        chunks = [f"flow.edges={{{','.join(f'{k}={v}' for k, v in edges.items())}}}"] if edges else []
        made = start(tmp_path, f"plan{number}", *THREE, *placed, *chunks)
        runs.setdefault(str(edges.get("actor", 4)), []).append(made)
    reference = next(iter(runs.values()))[0]
    for same_chunks in runs.values():
        assert len({fingerprint(run) for run in same_chunks}) == 1
        assert_near(reference, same_chunks[0], 1e-4)


@dataclass
class Noted:
    lines: list[str]

    def __call__(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True


class Moving:
    """A pilot that moves the engine to the other of two devices after every step."""

    def __init__(self, flow: FlowConfig) -> None:
        self.flow = flow

    def after_step(self, steering: Steering, report: Report) -> None:
        steering.switch({"rollout": str(report.step % 2), "actor": "0"}, self.flow, ())


def test_groups_that_move_between_steps_take_the_same_steps(tmp_path: Path) -> None:
    """Engines and environments are called for the next epoch of a channel whose earlier ones others have met."""
    two = (
        "cluster.devices=2",
        "placement.rollout=0",
        "placement.actor=0",
        "rollout.env_workers=1",
        INVARIANT,
        CORRECTED,
    )
    moved = start(tmp_path, "moved", *two, pilot=Moving(resolved(RECIPE, two).flow))
    assert fingerprint(moved) == fingerprint(start(tmp_path, "stays", *two))


class MovingOnce:
    """A pilot that moves both groups to the other of two devices, and later kills the trainer there."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, frozenset[int]], FlowConfig]] = []

    def after_step(self, steering: Steering, report: Report) -> None:
        session = steering.launch.session  # type: ignore[attr-defined]
        if report.step == 0:
            return
        if not self.seen:
            steering.switch({"rollout": "1", "actor": "1"}, FlowConfig(granularity=2), ())
        self.seen.append((dict(session.devices), steering.loop.flow.config))  # type: ignore[attr-defined]
        if len(self.seen) == 2:
            os.kill(session.groups["actor"].addresses()[0].pid, signal.SIGKILL)


def test_a_trainer_that_is_lost_after_a_switch_comes_back_where_it_was(tmp_path: Path) -> None:
    pilot, phases = MovingOnce(), []
    start(
        tmp_path, "lost", "cluster.devices=2", "placement.rollout=0", "placement.actor=0", "loop.steps=3",
        "eval.num_prompts=0", pilot=pilot, observers=[lambda report: phases.append(report.phase)],
    )  # fmt: skip
    assert "restart" in phases
    for devices, flow in pilot.seen:
        assert devices["actor"] == devices["rollout"] == {1} and flow.granularity == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_times_are_not_the_predicted_ones_changes_its_plan_without_a_restart(
    tmp_path: Path,
) -> None:
    """The profile says that the actor is slow and the engine quick, so the actor has two of three devices; it is the
    other way round. The plan is left within a few steps, the run goes on from where it is, and a resumed one follows
    the new plan."""
    overrides = (
        "cluster.devices=3", "loop.steps=10", "loop.checkpoint_every=0", "eval.num_prompts=0",
        "rollout.env.reward.function=tests.e2e.rewards:slowly",
    )  # fmt: skip
    config = resolved(RECIPE, overrides)
    wrong = profile(config, {"rollout": 0.01, "actor": 1.0}, swap_s=100.0)
    graph = {"batch": 4, "nodes": ["rollout", "actor"], "edges": {"rollout -> actor": 1e3}}
    wrong = Profile(identity=wrong.identity, workers=wrong.workers, graph=graph)
    problem = problem_of(config, {}, wrong, devices_of(config))
    found = search(problem)
    plan = Plan.of(problem, found)
    assert (len(plan.workers["rollout"].ids), len(plan.workers["actor"].ids)) == (1, 2)
    followed, _ = recipe_with(plan, *overrides)
    run = Run.create("drift", root=tmp_path, config_toml="")
    run.config_path.write_text(dump_config(followed))
    leave_in(run.path, plan, problem=problem, found=found, profile=wrong)
    noted = Noted([])
    logging.getLogger("rill.planning.replan").addFilter(noted)
    pilot = Replanner.of(followed, run, devices_of(followed))
    assert pilot is not None
    pilot.policy = Policy(window=3, cooldown=2)
    reports: list[StepReport] = []
    try:
        with run.running():
            WORKFLOWS.load("grpo")(followed, run, [reports.append]).run(pilot)
    finally:
        logging.getLogger("rill.planning.replan").removeFilter(noted)
    assert [report.step for report in reports] == list(range(11)), "no step is lost or taken twice"
    assert any("replanned after step" in line and "actor takes" in line for line in noted.lines), noted.lines
    changed = Plan.load(run.path / "plan.toml")
    assert (len(changed.workers["rollout"].ids), len(changed.workers["actor"].ids)) == (2, 1)
    saved = tomllib.loads(run.config_path.read_text())
    assert saved["placement"]["actor"] == changed.workers["actor"].devices
    assert json.loads((run.path / "plan.json").read_text())["why"][0].startswith("replanned after")
    again = resume(run, "loop.steps=11")
    assert again.path == run.path
