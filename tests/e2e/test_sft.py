"""`rill train` on supervised recipes: files of chats, several ranks, resume, and the way to RL and back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.errors import RillError, RunError
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.loop import Observer, StepReport
from tests.e2e import tiny
from tests.forks import forked_agents

RECIPE = Path(__file__).with_name("tiny_sft.toml")


def chats(count: int = 64) -> list[dict[str, Any]]:
    """Conversations of very unequal length, some of two turns."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        word = "".join(draw.choices("abcdef", k=draw.choice((2, 4, 30))))
        turns = [
            {"role": "user", "content": f"{number} {word}"},
            {"role": "assistant", "content": word[::-1]},
        ]
        if number % 3 == 0:
            turns += [{"role": "user", "content": "again"}, {"role": "assistant", "content": word[::-1]}]
        rows.append({"messages": turns})
    return rows


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in chats()), encoding="utf-8")
    return f"data.path={path}"


@pytest.fixture(scope="module")
def whole(jsonl: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[StepReport]]:
    """One rank, undisturbed."""
    reports: list[StepReport] = []
    return sft(tmp_path_factory.mktemp("whole"), jsonl, observers=[reports.append]), reports


def sft(root: Path, *overrides: str, observers: Sequence[Observer] = (), goes_on: Run | None = None) -> Run:
    recipe = load_recipe(RECIPE if goes_on is None else goes_on.config_path, list(overrides))
    config: Any = resolve(recipe_schema(recipe.values, str(recipe.path)), recipe.values, recipe.provenance)
    run = (
        Run.create("sft", root=root, config_toml=dump_config(config))
        if goes_on is None
        else Run.resume(goes_on.path)
    )
    with run.running(), forked_agents():
        WORKFLOWS.load(config.workflow)(config, run, observers).run()
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model" / "model.safetensors")


def assert_near(found: Run, wanted: Run, tolerance: float = 2e-3) -> None:
    for name, weight in weights(wanted).items():
        assert (weights(found)[name] - weight).norm() <= tolerance * weight.norm(), name


def assert_went_on(found: Run, start: Run) -> None:
    """Two steps from a model leave its embeddings near where they were, but not there."""
    name = "model.embed_tokens.weight"
    moved = (weights(found)[name] - weights(start)[name]).norm()
    assert 0 < moved < 0.5 * weights(start)[name].norm()


def test_a_run_on_chats_learns_and_its_model_loads_in_transformers(
    whole: tuple[Run, list[StepReport]],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, reports = whole
    losses = [report.metrics["sft/loss"] for report in reports]
    assert len(losses) == 6 and losses[-1] < losses[0]
    held_out = [report.metrics["eval/loss"] for report in reports if "eval/loss" in report.metrics]
    assert len(held_out) == 2 and held_out[1] < held_out[0]
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    assert model.num_parameters() > 0 and tokenizer.chat_template


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "trainer",
    [
        "trainer.tensor_parallel=1",
        pytest.param("trainer.tensor_parallel=2", marks=pytest.mark.slow),
        pytest.param("trainer.context_parallel=2", marks=pytest.mark.slow),
        pytest.param("trainer.optimizer.offload_state=true", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_weights_of_one(
    whole: tuple[Run, list[StepReport]], jsonl: str, tmp_path: Path, trainer: str
) -> None:
    reports: list[StepReport] = []
    run = sft(tmp_path, jsonl, "cluster.devices=2", trainer, observers=[reports.append])
    assert_near(run, whole[0])
    for found, wanted in zip(reports, whole[1], strict=True):
        assert found.metrics["sft/loss"] == pytest.approx(wanted.metrics["sft/loss"], rel=1e-3)
        assert found.metrics["sft/tokens"] == wanted.metrics["sft/tokens"]
        assert found.metrics["sft/rank_imbalance"] < 0.15


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    whole: tuple[Run, list[StepReport]], jsonl: str, tmp_path: Path
) -> None:
    def stop(report: StepReport) -> None:
        if report.step == 5:
            raise RuntimeError("stopped here")

    with pytest.raises(RuntimeError, match="stopped here"):
        sft(tmp_path, jsonl, observers=[stop])
    (broken,) = (Run(path) for path in tmp_path.iterdir())
    again: list[StepReport] = []
    run = sft(tmp_path, goes_on=broken, observers=[again.append])
    assert [report.step for report in again] == [4, 5, 6]
    assert tiny.fingerprint(run) == tiny.fingerprint(whole[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_one_rank_goes_on_with_two(
    whole: tuple[Run, list[StepReport]], jsonl: str, tmp_path: Path
) -> None:
    short = sft(tmp_path, jsonl, "loop.steps=3")
    run = sft(tmp_path, "loop.steps=6", "cluster.devices=2", goes_on=short)
    assert_near(run, whole[0])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_rl_starts_from_a_supervised_model_and_the_other_way_round(
    whole: tuple[Run, list[StepReport]], tmp_path: Path
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    start = f'model={{path="{whole[0].path / "model"}"}}'
    policy = tiny.start(tmp_path / "rl", "rl", start, "loop.steps=2")
    assert_went_on(policy, whole[0])

    rows = [
        {"prompt": row["messages"][0]["content"], "completion": row["messages"][1]["content"]}
        for row in chats()
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    after = f'model={{path="{policy.path / "model"}"}}'
    data = f'data={{type="parquet", path="{path}", held_out=0.0}}'
    reports: list[StepReport] = []
    run = sft(tmp_path / "sft", after, data, "loop.steps=2", observers=[reports.append])
    assert_went_on(run, policy)
    said = [note for report in reports for note in report.notes]
    assert len(said) == 1 and said[0].startswith("no evaluations: dataset 'parquet' has no held_out prompts")


@pytest.mark.timeout(180)
def test_a_warm_up_that_goes_on_notices_that_its_data_was_edited(jsonl: str, tmp_path: Path) -> None:
    def stop(report: StepReport) -> None:
        if report.phase == "warm-up" and report.step == 30:
            raise RunError("stopped by the test")

    path = tmp_path / "chats.jsonl"
    rows = Path(jsonl.removeprefix("data.path=")).read_text().splitlines()
    path.write_text("\n".join(rows))
    own = (
        "loop.steps=1",
        "sft.steps=40",
        "eval.num_prompts=0",
        "sft.data.type=jsonl",
        f"sft.data.path={path}",
    )
    with pytest.raises(RunError, match="stopped by the test"):
        tiny.start(tmp_path, "edited", *own, observers=[stop])
    path.write_text("\n".join([*rows[1:], rows[0]]))
    with pytest.raises(RillError, match="has other rows than the loader had read"):
        tiny.resume(Run.open("edited", root=tmp_path))
    path.write_text("\n".join(rows))
    later: list[StepReport] = []
    tiny.resume(Run.open("edited", root=tmp_path), observers=[later.append])
    # Every second step is reported, and what the first report tells is kept. Whether later ones are is a matter of how
    # long keeping takes; a warm-up that began anew would report step 2.
    assert later[0].phase == "warm-up" and later[0].step > 2


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_warm_up_learns_from_data_of_its_own(jsonl: str, tmp_path: Path) -> None:
    losses = []
    for name, data in (("own", ()), ("other", ("sft.data.type=jsonl", f"sft.{jsonl}"))):
        reports: list[StepReport] = []
        settings = ("loop.steps=1", "sft.steps=2", "eval.num_prompts=0", *data)
        tiny.start(tmp_path, name, *settings, observers=[reports.append])
        losses.append([r.metrics["sft/loss"] for r in reports if r.phase == "warm-up"][-1])
    assert losses[0] != losses[1]
