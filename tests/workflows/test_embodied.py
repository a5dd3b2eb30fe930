"""The whole of an embodied run, small: simulators in processes, the cycle, training, evaluation, films, the page."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.cli.driver import carry_out
from rill.cli.main import app
from rill.config.files import load_recipe
from rill.config.toml import dumps
from rill.envs.robots.bank import Played
from rill.envs.robots.recording import Recording
from rill.errors import ConfigError, DataError, RunError
from rill.planning.pilot import Report, Steering
from rill.planning.plan import Plan
from rill.planning.profile import DeviceKind, Points, Profile, WorkerProfile
from rill.planning.recipe import devices_on_paper, identity_of, problem_of, put_into
from rill.planning.search import search
from rill.policies.base import load_policy
from rill.runtime.group import WorkerGroup
from rill.telemetry.chrome import read_trace
from rill.telemetry.metrics import read_metrics
from rill.telemetry.run import Run
from rill.types import InitialState, Prompt
from rill.workers.records import TRAIN, Task
from rill.workers.robots.config import ImitationConfig
from rill.workers.robots.env import Group, RobotEnvWorker
from rill.workers.robots.outcome import finished
from rill.workflows.config import FlowConfig
from rill.workflows.embodied import Embodied
from rill.workflows.loop import StepReport
from rill.workflows.robot_config import RobotClusterConfig
from rill.workflows.robots import settings_of
from tests.data.test_lerobot import written
from tests.forks import forked_agents
from tests.policies.checkpoints import openvla, tokenizer

pytestmark = pytest.mark.timeout(
    600
)  # a run starts a dozen processes, which a busy machine takes its time for

POINT = "tests.envs.robots.fakes:PointSimulator"


def recipe(**changes: Any) -> Embodied.Config:
    values: dict[str, Any] = {
        "workflow": "embodied",
        "simulator": {"type": POINT},
        "policy": {"type": "tokens", "chunk": 2, "bins": 5, "width": 32, "depth": 1},
        "data": {"type": "initial_states", "tasks": ["left", "right"], "num_states": 400},
        "rollout": {"num_envs": 8, "stages": 2, "film_size": 24},
        "algorithm": {"gamma": 0.95},
        "trainer": {"learning_rate": 1e-2, "num_epochs": 3, "num_mini_batches": 2},
        "imitation": {"steps": 10, "demos": 4},
        "loop": {"steps": 6, "prompts_per_step": 32, "step_timeout_s": 100},
        "eval": {"num_prompts": 12, "every": 0},
        "cluster": {"devices": 2},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        values[table] = {**values[table], name: value} if name else value
    return Embodied.Config(**values)


def run_of(config: Embodied.Config, run: Run) -> list[StepReport]:
    reports: list[StepReport] = []
    with run.running(), forked_agents():
        Embodied(config, run, [reports.append]).run()
    return [report for report in reports if report.phase == "step"]


def weights_of(run: Run) -> bytes:
    return (run.path / "model" / "model.safetensors").read_bytes()


def test_a_robot_learns_and_the_page_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("robot", root=tmp_path, config_toml="")
    # With a stronger start six of six seeds learn; with the recipe's own, some batches see hardly a success.
    with forked_agents():
        carry_out(recipe(imitation__steps=40, loop__steps=8), run)
    first, *_, last = (row.values for row in read_metrics(run.path) if row.step > 0)
    assert last["success/mean"] > first["success/mean"] + 0.2 and last["eval/accuracy"] >= 0.75
    assert {"eval/left/accuracy_low", "eval/right/accuracy_high"} <= last.keys()
    assert last["mismatch/abs_mean"] == 0.0 and last["lag/max"] == 0.0
    assert 0.0 < last["rollout/simulating"] < 1.0
    films = sorted((run.path / "media").glob("*.gif"))
    assert len(films) == 4 and all(film.read_bytes()[:3] == b"GIF" for film in films)
    page = (run.path / "report.html").read_text()
    assert base64.b64encode(films[0].read_bytes()).decode() in page and "go left" in page
    assert load_policy(run.path / "model").spec.state_size == 2


@pytest.mark.slow
def test_grpo_ahead_on_split_devices_counts_episodes_of_crashed_simulators_and_goes_on(
    tmp_path: Path,
) -> None:
    config = recipe(
        simulator__crash_every=9,
        algorithm={"estimator": "group", "max_success": 0.95},
        rollout__group_size=4,
        loop={"steps": 3, "prompts_per_step": 8, "max_lag": 1, "step_timeout_s": 100},
        placement={"env": "0", "rollout": "0", "actor": "1"},
        eval={"num_prompts": 0},
        curriculum={},
    )
    reports = run_of(config, Run.create("robot", root=tmp_path, config_toml=""))
    trained = [report.metrics for report in reports if "grad_norm" in report.metrics]
    assert len(trained) == 3 and max(metrics["lag/max"] for metrics in trained) <= 1.0
    assert "curriculum/chance_0" in trained[-1]
    lost = sum(m["rollout/errors"] + m.get("groups/dropped_failed", 0.0) for m in trained)
    assert lost > 0.0, "states 0, 9, 18, … end their process"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout__num_envs": 1}, "2 stages"),
        ({"algorithm__estimator": "group"}, "set rollout.group_size to 8"),
        ({"loop__overprovision": 0.5}, "cannot be"),
        ({"data": {"type": "arithmetic"}}, "'initial_states'"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_anything_starts(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        recipe(**changes)


def test_a_task_that_the_simulator_has_not_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = recipe(data__tasks=["up"])
    with pytest.raises(ConfigError, match="no task 'up': it has left, right"):
        run_of(config, Run.create("robot", root=tmp_path, config_toml=""))


def test_each_evaluation_set_is_played_at_its_own_temperature() -> None:
    drawn = {"name": "drawn", "samples": 2, "temperature": 1.0, "data": recipe().data.model_dump()}
    greedy = {**drawn, "name": "greedy", "samples": 1, "temperature": 0.0}
    settings = settings_of(recipe(eval__sets=[drawn, greedy]))
    worker = RobotEnvWorker.__new__(RobotEnvWorker)
    worker.settings = settings
    played = {}
    for purpose in (TRAIN, "held_out", "drawn", "greedy"):
        lease = SimpleNamespace(value=Task(index=0, prompt=Prompt(id="p"), num_samples=1, purpose=purpose))
        played[purpose] = worker._how(Group(lease))  # type: ignore[arg-type]
    assert played == {
        TRAIN: (True, False),
        "held_out": (False, True),
        "drawn": (False, False),
        "greedy": (False, True),
    }
    without_held_out = settings_of(recipe(eval__temperature=1.0, eval__sets=[drawn, greedy]))
    assert without_held_out.greedy == {"greedy"}


def test_robots_have_the_guards_of_every_run_and_their_own_and_a_recipe_may_change_them() -> None:
    config = recipe(guard_actions={"success flat": "off", "disk": "stop"})
    found = {guard.name: guard.action for guard in config.guards()}
    assert found["disk"] == "stop" and "policy-bound" in found and "success flat" not in found
    assert "truncated answers" not in found, "those of language say nothing of a robot"


def test_a_failed_episode_is_no_score_and_in_no_group() -> None:
    task = Task(index=0, prompt=Prompt(id="p"), num_samples=2)
    start = InitialState("point", "left", 0)
    lost = Recording("g00000000/0", "g00000000", start, Played.failed("the process died")).trajectory()
    outcome, kept = finished(EmbodiedAlgorithmConfig(), task, [lost], simulating=0.5)
    assert kept == [] and outcome.dropped == "failed" and outcome.metrics["rollout/errors"] == 1.0
    scored, _ = finished(EmbodiedAlgorithmConfig(), replace(task, purpose="held_out"), [lost], simulating=0.5)
    assert math.isnan(scored.rewards[0]) and scored.error == "the process died", "what the run ends with"


@pytest.mark.slow
def test_stages_placement_and_a_resume_change_no_bit_of_a_synchronous_run(tmp_path: Path) -> None:
    runs = [Run.create("robot", root=tmp_path, config_toml="") for _ in range(4)]
    run_of(recipe(), runs[0])
    apart = {
        "env": "robot:0",
        "rollout": "0",
        "actor": "1",
    }  # a robot, or what stands for it, is a device of its own
    split = recipe(
        rollout__stages=1, rollout__num_envs=5, placement=apart, cluster={"devices": "cpu:2,robot:1"}
    )
    run_of(split, runs[1])
    assert weights_of(runs[0]) == weights_of(runs[1])
    run_of(recipe(loop__steps=3), runs[2])
    run_of(recipe(), runs[2])
    assert weights_of(runs[0]) == weights_of(runs[2])

    def stop(report: StepReport) -> None:
        if report.step == 5:
            raise RunError("stopped while it imitates")

    with pytest.raises(RunError, match="while it imitates"), runs[3].running(), forked_agents():
        Embodied(recipe(), runs[3], [stop]).run()
    run_of(recipe(), runs[3])
    assert weights_of(runs[0]) == weights_of(runs[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "trainer"),
    [
        ({"type": "gaussian", "chunk": 2}, {"type": "ppo"}),
        ({"type": "flow", "chunk": 2}, {"type": "ppo"}),
        ({"type": "squashed"}, {"type": "sac", "warm_up": 20, "batch_size": 32}),
    ],
    ids=["gaussian", "flow", "sac"],
)
def test_every_kind_of_policy_runs_through_the_same_flow(
    policy: dict[str, Any], trainer: dict[str, Any], tmp_path: Path
) -> None:
    config = recipe(
        policy={**policy, "width": 32},
        trainer=trainer,
        loop={"steps": 2, "prompts_per_step": 16, "step_timeout_s": 300},
        eval={"num_prompts": 4},
    )
    reports = run_of(config, Run.create("robot", root=tmp_path, config_toml=""))
    assert [report.step for report in reports] == [0, 1, 2]
    assert reports[-1].metrics["grad_norm"] > 0.0 and reports[-1].metrics["rollout/errors"] == 0.0
    assert reports[-1].metrics.get("mismatch/abs_mean", 0.0) == 0.0


@pytest.mark.slow
def test_a_pretrained_policys_adapters_are_trained_and_sent_and_a_data_set_is_imitated_first(
    tmp_path: Path,
) -> None:
    tokenizer(tmp_path / "vla")
    openvla(tmp_path / "vla")
    stats = {"point": {"action": {"q01": [-1.0], "q99": [1.0]}}}
    (tmp_path / "vla" / "dataset_statistics.json").write_text(json.dumps(stats))
    image = {"dtype": "image", "shape": [8, 8, 3]}
    config = recipe(
        simulator__image_size=16,
        policy={"type": "openvla", "path": str(tmp_path / "vla"), "chunk": 2, "lora": {"rank": 2}},
        imitation={"steps": 4, "dataset": str(written(tmp_path / "set", "v3.0")), "batch_size": 8},
        loop={"steps": 2, "prompts_per_step": 16, "step_timeout_s": 300},
        eval={"num_prompts": 4},
    )
    run = Run.create("robot", root=tmp_path, config_toml="")
    reports = run_of(config, run)
    assert [report.step for report in reports] == [0, 1, 2]
    assert reports[-1].metrics["mismatch/abs_mean"] == 0.0 and reports[-1].metrics["grad_norm"] > 0.0
    assert (run.path / "model" / "dataset_statistics.json").is_file()
    assert load_policy(run.path / "model").spec.action_size == 1
    broken = {"observation.images.front": image | {"dtype": "video"}}
    refused = {"steps": 4, "dataset": str(written(tmp_path / "films", "v2.1", **broken))}
    with pytest.raises(DataError, match="as video files"):
        run_of(config.model_copy(update={"imitation": ImitationConfig(**refused)}), run)


class Switching(NamedTuple):
    """A pilot: apart, then in turns, then all in memory on the other device."""

    def after_step(self, steering: Steering, report: Report) -> None:
        plans: dict[int, tuple[dict[str, str], tuple[str, ...]]] = {
            1: ({"rollout": "1", "actor": "0"}, ()),
            2: ({"rollout": "0", "actor": "0"}, ()),
            3: ({"rollout": "1", "actor": "1"}, ("actor", "rollout")),
        }
        if report.step in plans:
            placement, staying = plans[report.step]
            steering.switch(placement, FlowConfig(), staying)


@pytest.mark.slow  # e2e/test_plans.py has it of a language model
def test_a_plan_may_change_between_steps_and_no_bit_of_the_result(tmp_path: Path) -> None:
    plain, switched = (Run.create("robot", root=tmp_path, config_toml="") for _ in range(2))
    config = recipe(
        simulator={"type": "tests.envs.robots.fakes:PointScenes"},
        loop__steps=4,
        loop__prompts_per_step=16,
        imitation={"steps": 0},
    )
    run_of(config, plain)
    with switched.running(), forked_agents():
        Embodied(config, switched, ()).run(pilot=Switching())
    assert weights_of(plain) == weights_of(switched)
    seen = {(event.name, event.lane) for event in read_trace(switched.path)}
    assert seen >= {(f"{name}[0]", f"device {n}") for name in ("env", "rollout", "actor") for n in (0, 1)}


def test_what_fits_into_memory_together_stays_there_by_plan(tmp_path: Path) -> None:
    config = recipe()
    graph = {"batch": 32, "nodes": ["rollout", "actor"], "edges": {"rollout -> actor": 1e3}}

    def planned(held_bytes: float) -> Plan:
        points = Points(
            kind="cpu", items=(8.0, 32.0), replicas=(1, 1), seconds=(1.0, 4.0),
            memory_bytes=(held_bytes, held_bytes), onload_s=0.5,
        )  # fmt: skip
        measured = Profile(
            identity=identity_of(config, 1, "the test"),
            devices={"cpu": DeviceKind(memory_bytes=100.0)},
            workers={name: WorkerProfile(options={"cpu1": points}) for name in ("rollout", "actor")},
            graph=graph,
        )
        problem = problem_of(config, {}, measured, devices_on_paper({"cpu": 1}))
        return Plan.of(problem, search(problem))

    assert planned(40.0).structure == "together(rollout, actor)"
    assert planned(60.0).structure == "turns(rollout, actor)"
    assert planned(60.0).step_s > planned(40.0).step_s
    values: dict[str, Any] = {}
    put_into(values, {}, planned(40.0), "plan auto")
    resolved = recipe(cluster={"devices": 1, **values["cluster"]}, placement=values["placement"])
    assert resolved.together == ("env", "rollout", "actor")
    assert resolved.stay("rollout", "actor") and not config.stay("rollout", "actor")


@pytest.mark.slow
def test_a_recipe_of_a_robot_is_measured_and_planned(tmp_path: Path) -> None:
    folder = tmp_path / "robot.toml"
    folder.write_text(dumps(recipe(imitation={"steps": 0}, loop__prompts_per_step=8).model_dump(mode="json")))
    made = CliRunner().invoke(
        app, ["train", str(folder), "--plan", "auto", "--root", str(tmp_path), "loop.steps=2"]
    )
    assert made.exit_code == 0, made.output
    assert "not split" in made.output or "not shared" in made.output
    (run,) = (found for found in tmp_path.glob("*/plan.toml"))
    assert Plan.load(run).workers.keys() == {"rollout", "actor"}


@pytest.mark.slow
def test_a_policy_stays_beside_simulators_on_its_device_and_whether_the_trainer_does_changes_no_bit(
    tmp_path: Path,
) -> None:
    """Out and in again for the trainer, once a step, and never for a chunk of the simulators."""
    turns, all_stay = (Run.create("robot", root=tmp_path, config_toml="") for _ in range(2))
    simulator = {"type": "tests.envs.robots.fakes:PointScenes", "step_s": 0.002}
    config = recipe(simulator=simulator, loop__steps=3, cluster={"devices": 1})
    run_of(config, turns)
    run_of(config.model_copy(update={"cluster": RobotClusterConfig(devices=1, colocate=True)}), all_stay)
    assert weights_of(turns) == weights_of(all_stay)
    for run in (turns, all_stay):
        assert num_overlaps(run, "simulate", "rollout.decide") > 0
    moved_out = [
        sum(event.name == "offload" and event.lane.startswith("rollout") for event in read_trace(run.path))
        for run in (turns, all_stay)
    ]
    num_chunks = sum(event.name == "rollout.decide" for event in read_trace(turns.path))
    assert 0 < moved_out[0] <= 4 < num_chunks and moved_out[1] == 0


def num_overlaps(run: Run, one: str, other: str) -> int:
    """Pairs of spans of these names that were open at the same time."""
    spans = {
        name: [
            (event.at_ns, event.at_ns + event.duration_ns)
            for event in read_trace(run.path)
            if event.name == name
        ]
        for name in (one, other)
    }
    assert spans[one] and spans[other]
    return sum(a < d and c < b for a, b in spans[one] for c, d in spans[other])


@pytest.mark.slow
def test_killed_simulators_policies_and_trainers_change_no_bit_of_the_result(tmp_path: Path) -> None:
    plain, killed = (Run.create("robot", root=tmp_path, config_toml="") for _ in range(2))
    config = recipe(simulator__step_s=0.01, loop__checkpoint_every=2)
    run_of(config, plain)
    phases: list[str] = []

    def victim(step: int) -> WorkerGroup[Any] | None:
        return {1: workflow.env, 3: workflow.rollout, 5: workflow.actor}.get(step)

    def observe(report: StepReport) -> None:
        is_new = phases.count("step") == report.step
        phases.append(report.phase)
        if report.phase == "step" and is_new and (group := victim(report.step)) is not None:
            pid = group.addresses()[0].pid
            threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()

    workflow = Embodied(config, killed, [observe])
    with killed.running(), forked_agents():
        workflow.run()
    assert phases.count("restart") == 1, "a lost trainer's run goes on from its last checkpoint"
    assert weights_of(plain) == weights_of(killed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_to_touch_the_named_block(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    values = load_recipe(Path(__file__).parents[2] / "recipes" / "robot.toml", [f"seed={seed}"])
    reports = run_of(Embodied.Config(**values.values), Run.create("robot", root=tmp_path, config_toml=""))
    evaluated = [report.metrics["eval/accuracy"] for report in reports if "eval/accuracy" in report.metrics]
    assert evaluated[0] <= 0.3 and evaluated[-1] >= 0.9
