"""`rill plan` and `rill simulate` from files and from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rill
from rill.cli.main import app
from rill.planning.plan import Plan
from rill.planning.profile import Profile

RECIPE = str(Path(__file__).parents[1] / "e2e" / "tiny.toml")
GRAPH = """
[graph]
batch = 64
nodes = ["rollout", "actor"]
[graph.edges]
"rollout -> actor" = 1000.0
[graph.syncs]
"actor -> rollout" = 1e9
"""

PROFILE = f"""
[identity]
model = "m"
machine = "box"
version = "{rill.__version__}"
[devices.gpu]
memory_bytes = 8e10
link_bytes_per_s = 1e10
[workers.rollout]
streams = true
lengths = [10, 20, 90]
[workers.rollout.options.gpu1]
kind = "gpu"
items = [8, 16, 32]
replicas = [1, 1, 1]
seconds = [1.0, 1.5, 2.5]
memory_bytes = [4e10, 4e10, 5e10]
tail_s = 0.01
[workers.actor.options.gpu1]
kind = "gpu"
items = [8, 16, 32]
replicas = [1, 1, 1]
seconds = [2, 4, 8]
onload_s = 0.2
"""


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.toml").write_text(PROFILE + GRAPH)


PROFILED = (RECIPE, "-p", "p.toml", "--other-ok")
"""The profile is of a model that is not at hand."""


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result.output


def test_a_plan_is_printed_and_written() -> None:
    said = run("plan", *PROFILED, "-n", "8", "-o", "plan.toml")
    plan = Plan.load("plan.toml")
    assert plan.structure in said
    assert "held-out error" in said
    assert "not split" in said or "not shared" in said
    assert json.loads(run("plan", *PROFILED, "-n", "8", "--json"))["structure"] == plan.structure


def test_the_graph_is_drawn() -> None:
    assert "flowchart LR" in run("plan", *PROFILED, "-n", "2", "--graph", "mermaid")


def test_placements_and_modes_are_obeyed() -> None:
    assert "6-7" in run("plan", *PROFILED, "placement.actor=6-7", "-n", "8", "--mode", "split")


def test_profiles_are_merged_and_saved() -> None:
    run("plan", *PROFILED, "-p", "p.toml", "-n", "2", "--save-profile", "both.toml")
    assert len(Profile.load("both.toml").workers["actor"].options["gpu1"].items) == 6


def test_a_profile_of_another_version_is_refused_or_marked() -> None:
    old = PROFILE.replace(f'version = "{rill.__version__}"', 'version = "0.0.0"')
    Path("old.toml").write_text(old + GRAPH)
    assert "--other-ok" in run("plan", RECIPE, "-p", "old.toml", "-n", "2", exit_code=2)
    assert "mind: the profile's version is '0.0.0'" in run(
        "plan", RECIPE, "-p", "old.toml", "-n", "2", "--other-ok"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*PROFILED, "-n", "tpu=2"], "no worker was measured on tpu"),
        ([*PROFILED, "-n", "0"], "at least one device"),
        ([*PROFILED, "-n", "two"], "write a number for each kind"),
        ([*PROFILED, "-n", "4,4"], "names gpu twice"),
        ([*PROFILED, "-n", "2", "placement.actor=0-3"], "placement"),
        (["nothing", "-p", "p.toml", "-n", "2"], "is no recipe or run"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], words: str) -> None:
    assert words in run("plan", *arguments, exit_code=2)


def test_a_profile_without_a_graph_says_so_and_the_batch_and_the_placement_are_the_recipes() -> None:
    said = run("plan", *PROFILED, "placement.actor=0", "-n", "4", "--json")
    assert json.loads(said)["batch"] == 4  # its prompts
    assert json.loads(said)["workers"]["actor"]["devices"] == "0"
    Path("bare.toml").write_text(PROFILE)
    assert "[graph]" in run("plan", RECIPE, "-p", "bare.toml", "-n", "gpu=4", "--other-ok", exit_code=2)


def test_scaling_is_simulated_and_drawn() -> None:
    said = run("simulate", *PROFILED, "-n", "64", "--from", "2", "--svg", "s.svg", "--steps", "2")
    assert "knee" in said
    assert Path("s.svg").read_text().startswith("<svg")
    values = json.loads(run("simulate", *PROFILED, "-n", "8", "--from", "4", "--json"))
    assert [size["devices"] for size in values["sizes"]] == [4, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "-3"], "--from"),
        (["--failures-per-hour", "-1"], "failures_per_hour is -1.0: it counts from 0"),
        (["--jitter", "nan"], "jitter is nan"),
        (["--slow", "0.5:0"], "at least 1 time as long"),
        (["--slow", "2:3"], "at most 1"),
        (["--steps", "0"], "simulate one at least"),
    ],
)
def test_weather_and_sizes_that_cannot_be_are_refused(arguments: list[str], words: str) -> None:
    assert words in run("simulate", *PROFILED, "-n", "8", *arguments, exit_code=2)


def test_a_small_cluster_is_simulated_from_one_device_on() -> None:
    sizes = json.loads(run("simulate", *PROFILED, "-n", "4", "--json"))["sizes"]
    assert [size["devices"] for size in sizes] == [1, 2, 4]
    assert "one size has a plan, 1" in run("simulate", *PROFILED, "-n", "1")


def test_workers_that_take_no_time_are_no_division_by_zero() -> None:
    text = (PROFILE + GRAPH).replace("tail_s = 0.01", "").replace("onload_s = 0.2", "").replace("1e9", "0.0")
    for seconds in ("[1.0, 1.5, 2.5]", "[2, 4, 8]"):
        text = text.replace(f"seconds = {seconds}", "seconds = [0, 0, 0]")
    Path("p.toml").write_text(text)
    for devices in ("1", "5"):
        assert "0 s a step" in run("plan", *PROFILED, "-n", devices)
        run("simulate", *PROFILED, "-n", devices, "--svg", "s.svg")


def test_memory_that_is_only_divided_over_devices_counts() -> None:
    bare = (PROFILE + GRAPH).replace("memory_bytes = [4e10, 4e10, 5e10]", "")
    Path("p.toml").write_text(bare.replace("onload_s = 0.2", "sharded_bytes = 1.6e11"))
    said = run("plan", *PROFILED, "-n", "1", exit_code=2)
    assert "actor does not fit: it needs 149.0 GiB of a gpu device, which has 74.5 GiB" in said
    assert json.loads(run("plan", *PROFILED, "-n", "2", "--json"))["workers"]["actor"]["devices"] == "0-1"


def test_a_plans_own_file_is_simulated_in_bad_weather() -> None:
    run("plan", *PROFILED, "-n", "8", "--mode", "split", "-o", "plan.toml")
    calm = json.loads(run("simulate", *PROFILED, "-n", "8", "--plan", "plan.toml", "--json"))
    rough = json.loads(
        run("simulate", *PROFILED, "-n", "8", "--plan", "plan.toml", "--slow", "1:3", "--json")
    )
    assert sum(rough["step_s"]) > sum(calm["step_s"])
    assert "SHARE:FACTOR" in run("simulate", *PROFILED, "-n", "8", "--slow", "a:b", exit_code=2)
