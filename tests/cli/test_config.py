from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli.main import app


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/small.toml").write_text(
        "# A small run\nworkflow = 'tests.config.parts:SmallWorkflow'\nsteps = 3\n"
    )


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result.output


def test_show_prints_every_value_with_its_source() -> None:
    text = run("config", "show", "small", "trainer.learning_rate=0.5")
    assert "# recipes/small.toml:3" in text
    assert "# command line" in text
    assert "# default" in text
    assert tomllib.loads(text)["trainer"]["learning_rate"] == 0.5


def test_what_show_prints_is_a_recipe_for_the_same_run() -> None:
    text = run("config", "show", "small", "trainer.learning_rate=0.5")
    Path("recipes/copy.toml").write_text(text)
    assert tomllib.loads(run("config", "show", "copy")) == tomllib.loads(text)


def test_show_speaks_json() -> None:
    shown = json.loads(run("config", "show", "small", "--json"))
    assert shown["values"]["steps"] == 3
    assert shown["sources"]["steps"] == "recipes/small.toml:3"


def test_check_says_that_it_is_valid() -> None:
    assert run("config", "check", "small") == "recipes/small.toml: valid\n"


def test_keys_explains_what_can_be_set() -> None:
    text = run("config", "keys", "small", "--find", "block")
    assert text.splitlines() == ["engine.block_size = 16    (int)", "    Tokens in a block."]
    assert "no key contains 'blok'" in run("config", "keys", "small", "--find", "blok")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed=-1", "error: command line: seed = -1: expected greater than or equal to 0\n"),
        (f"seed={1 << 63}", "expected less than 9223372036854775808\n"),
        ("model.shap=x", "error: command line: model.shap = \"x\": unknown key (did you mean 'shape'?)\n"),
        ("rollout.sampling.temperature=-1", "temperature = -1: expected greater than or equal to 0\n"),
        ("rollout.sampling.temperature=0", "set it above 0"),
    ],
)
def test_a_wrong_value_of_a_real_recipe_is_one_line_about_that_value(
    change: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    result = CliRunner().invoke(app, ["config", "check", "demo", change])
    assert result.exit_code == 2
    assert said in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=3", "lr = 3: unknown key here (did you mean 'trainer.optimizer.learning_rate'?)"),
        ("rollout.temprature=1", "(did you mean 'rollout.sampling.temperature'?)"),
        ("loop={ step = 3 }", "loop.step = 3: unknown key (did you mean 'steps'?)"),
        ("model=./mine", "unknown key: valid in [model] are path, seed, shape, tokenizer"),
        ("loop=5", "loop = 5: expected a table of keys"),
        ("loop.steps=true", "loop.steps = true: expected a whole number"),
        ("rollout.sampling={ temperature = false }", "temperature = false: expected a number"),
        ("sinks=[wandb]", "texts in a list or a table have quotes"),
    ],
)
def test_a_wrong_override_names_the_key_the_nearest_one_or_what_was_expected(
    override: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))
    for _ in range(2):  # before and after the keys are remembered
        assert words in run("config", "show", "demo", override, exit_code=2)
        run("config", "show", "demo", "cluster.colocate=true")
