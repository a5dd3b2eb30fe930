"""The examples: each is one file, its command is right, and a run with it works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.own_engine import PlainEngine
from rill.config.files import load_recipe
from rill.config.resolve import resolve
from rill.inference.base import Engine
from rill.models.loading import ModelConfig
from rill.telemetry.jsonl import read_lines
from rill.telemetry.metrics import read_metrics
from rill.telemetry.rollouts import each_group
from rill.workflows import recipe_schema
from tests.e2e.tiny import start
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import SHAPES, reference

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("own_*.py"))


def command_of(example: Path) -> list[str]:
    """The command that the file's docstring gives."""
    found = re.search(
        r"^    rill train (.*?)\n\n", example.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert found is not None, f"{example.name} does not say how it is used"
    return shlex.split(found.group(1).replace("\\\n", " "))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_command_of_an_example_names_its_file_and_is_valid(example: Path) -> None:
    recipe, *overrides = command_of(example)
    assert any(f"examples.{example.stem}:" in override for override in overrides)
    values = load_recipe(recipe, overrides)
    resolve(recipe_schema(values.values), values.values, values.provenance)


def test_every_example_stands_in_the_page_about_extending() -> None:
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    for example in EXAMPLES:
        assert f"(../examples/{example.name})" in page


def test_a_run_with_all_examples_at_once_trains(tmp_path: Path) -> None:
    run = start(
        tmp_path,
        "own",
        "loop.steps=2",
        "data.type=examples.own_task:Reversal",
        "algorithm.loss.type=examples.own_loss:BetterHalf",
        "rollout.env.type=function",
        "rollout.env.function=examples.own_environment:second_try",
        "rollout.env.reward.type=function",
        "rollout.env.reward.function=examples.own_reward:short_and_right",
    )
    assert (run.path / "model" / "config.json").exists()
    groups = [record for path in run.rollouts_dir.glob("*.jsonl") for record in read_lines(path, "samples")]
    first = next(group["samples"][0] for group in groups if "evaluates" not in group)
    tokens = "".join(first["tokens"])
    assert re.match(r"\d+>", tokens), "the task is the example's"
    assert "wrong, again: " in tokens, "so is the environment: an untrained model is wrong at first"
    assert first["parts"].keys() == {"short_and_right"}
    assert not [r for r in read_metrics(run.path) if r.values.get("rollout/errors")]


class TestPlainEngine(EngineConformance):
    """The example engine under the suite that every engine runs."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = PlainEngine(
            PlainEngine.Config(type="plain", model=ModelConfig(shape=SHAPES["llama"], seed=0))
        )
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return reference()


@pytest.mark.slow
def test_a_run_with_the_example_engine_trains(tmp_path: Path) -> None:
    run = start(tmp_path, "plain", "loop.steps=2", "rollout.engine.type=examples.own_engine:PlainEngine")
    steps = [row.values for row in read_metrics(run.path) if "mismatch/abs_mean" in row.values]
    assert (run.path / "model" / "config.json").exists()
    assert all(values["mismatch/abs_mean"] < 1e-4 for values in steps)
    stops = {sample.stop for group in each_group(run) for sample in group.samples}
    assert "eos" in stops, "an answer ends where the recipe's tokenizer says it ends"
