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

GRAPH = """
batch = 64
nodes = ["rollout", "actor"]
[edges]
"rollout -> actor" = 1000.0
[syncs]
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
    Path("g.toml").write_text(GRAPH)
    Path("p.toml").write_text(PROFILE)


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result.output


def test_a_plan_is_printed_and_written() -> None:
    said = run("plan", "g.toml", "-p", "p.toml", "-n", "8", "-o", "plan.toml")
    plan = Plan.load("plan.toml")
    assert plan.structure in said
    assert "held-out error" in said
    assert "not split" in said or "not shared" in said
    assert (
        json.loads(run("plan", "g.toml", "-p", "p.toml", "-n", "8", "--json"))["structure"] == plan.structure
    )


def test_the_graph_is_drawn() -> None:
    assert "flowchart LR" in run("plan", "g.toml", "--graph", "mermaid")


def test_pins_modes_and_lags_are_obeyed() -> None:
    said = run(
        "plan", "g.toml", "-p", "p.toml", "-n", "8", "--pin", "actor=6-7", "--mode", "split", "--lag", "1"
    )
    assert "6-7" in said
    assert "error" in run("plan", "g.toml", "-p", "p.toml", "-n", "8", "--pin", "actor", exit_code=2)


def test_profiles_are_merged_and_saved() -> None:
    run("plan", "g.toml", "-p", "p.toml", "-p", "p.toml", "-n", "2", "--save-profile", "both.toml")
    assert len(Profile.load("both.toml").workers["actor"].options["gpu1"].items) == 6


def test_a_profile_of_another_version_is_refused_or_marked() -> None:
    Path("old.toml").write_text(PROFILE.replace(f'version = "{rill.__version__}"', 'version = "0.0.0"'))
    assert "--other-ok" in run("plan", "g.toml", "-p", "old.toml", "-n", "2", exit_code=2)
    assert "mind: the profile's version is '0.0.0'" in run(
        "plan", "g.toml", "-p", "old.toml", "-n", "2", "--other-ok"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["g.toml", "-p", "p.toml"], "how many devices"),
        (["g.toml", "-n", "2"], "is a graph: give a profile"),
        (["g.toml", "-p", "p.toml", "-n", "tpu=2"], "no worker was measured on tpu"),
        (["g.toml", "-p", "p.toml", "-n", "0"], "at least one device"),
        (["g.toml", "-p", "p.toml", "-n", "2", "--pin", "actor=0-3"], "pinned to 4 devices"),
        (["nothing", "-p", "p.toml", "-n", "2"], "no recipe, run or graph file"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], words: str) -> None:
    assert words in run("plan", *arguments, exit_code=2)


def test_a_recipe_is_planned_from_a_profile_that_knows_its_graph_and_one_without_says_so() -> None:
    recipe = str(Path(__file__).parents[1] / "e2e" / "tiny.toml")
    graph = '[graph]\nbatch = 64\nnodes = ["rollout", "actor"]\n[graph.edges]\n"rollout -> actor" = 1000.0\n'
    Path("traced.toml").write_text(graph + PROFILE)
    said = run("plan", recipe, "placement.actor=0", "-p", "traced.toml", "-n", "4", "--other-ok", "--json")
    assert json.loads(said)["batch"] == 4  # the recipe's prompts
    assert json.loads(said)["workers"]["actor"]["devices"] == "0"  # and its own placement
    assert "[graph]" in run("plan", recipe, "-p", "p.toml", "-n", "gpu=4", "--other-ok", exit_code=2)


def test_scaling_is_simulated_and_drawn() -> None:
    said = run(
        "simulate", "g.toml", "-p", "p.toml", "-n", "64", "--from", "2", "--svg", "s.svg", "--steps", "2"
    )
    assert "knee" in said
    assert Path("s.svg").read_text().startswith("<svg")
    values = json.loads(run("simulate", "g.toml", "-p", "p.toml", "-n", "8", "--from", "4", "--json"))
    assert [size["devices"] for size in values["sizes"]] == [4, 8]


def test_a_plans_own_file_is_simulated_in_bad_weather() -> None:
    run("plan", "g.toml", "-p", "p.toml", "-n", "8", "--mode", "split", "-o", "plan.toml")
    calm = json.loads(run("simulate", "g.toml", "-p", "p.toml", "-n", "8", "--plan", "plan.toml", "--json"))
    rough = json.loads(
        run("simulate", "g.toml", "-p", "p.toml", "-n", "8", "--plan", "plan.toml", "--slow", "1:3", "--json")
    )
    assert sum(rough["step_s"]) > sum(calm["step_s"])
    assert "SHARE:FACTOR" in run(
        "simulate", "g.toml", "-p", "p.toml", "-n", "8", "--slow", "a:b", exit_code=2
    )
