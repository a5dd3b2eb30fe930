"""`rill train` on preferences, and the way from pairs to a policy: reward model, then RL with it; or DPO at once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rill.errors import WorkerError
from rill.telemetry.run import Run
from rill.workflows.loop import StepReport
from tests.e2e import tiny
from tests.e2e.test_sft import sft, weights


def pairs(count: int = 48) -> list[dict[str, Any]]:
    """Answers in digits are preferred to answers in letters; half of the rows are conversations."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        chosen = "".join(draw.choices("0123456789", k=draw.randint(2, 9)))
        rejected = "".join(draw.choices("abcdefgh", k=draw.randint(2, 9)))
        asked = {"role": "user", "content": f"write {number}"}
        if number % 2:
            rows.append({"prompt": asked["content"], "chosen": chosen, "rejected": rejected, "margin": 0.1})
        else:
            talks = [[asked, {"role": "assistant", "content": text}] for text in (chosen, rejected)]
            rows.append({"chosen": talks[0], "rejected": talks[1]})
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in pairs()), encoding="utf-8")
    return f"data.path={path}"


def train(
    root: Path, workflow: str, data: str, *overrides: str, steps: int = 10
) -> tuple[Run, list[StepReport]]:
    reports: list[StepReport] = []
    settings = (f"workflow={workflow}", f"loop.steps={steps}", "loop.eval_every=5", "loop.checkpoint_every=0")
    run = sft(root, data, *settings, *overrides, observers=[reports.append])
    return run, reports


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_reward_model_learns_to_prefer_and_rewards_an_rl_run(data: str, tmp_path: Path) -> None:
    run, reports = train(tmp_path / "rm", "reward_model", data)
    assert reports[-1].metrics["reward_model/loss"] < 0.5 * reports[0].metrics["reward_model/loss"]
    assert reports[-1].metrics["eval/accuracy"] == 1.0
    assert (run.path / "model" / "value_head.safetensors").exists()
    steps: list[StepReport] = []
    tiny.start(
        tmp_path / "rl",
        "rl",
        f"reward_model.model.path={run.path / 'model'}",
        "loop.steps=2",
        observers=[steps.append],
    )
    assert any(report.metrics.get("reward/model", 0.0) != 0.0 for report in steps)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_dpo_widens_the_margin_to_its_reference_and_two_ranks_do_as_one(data: str, tmp_path: Path) -> None:
    run, reports = train(tmp_path / "one", "dpo", data, steps=5)
    assert reports[0].metrics["dpo/loss"] == pytest.approx(0.693, abs=1e-3)
    assert reports[-1].metrics["dpo/loss"] < 0.5 and reports[-1].metrics["eval/margin"] > 0.5
    ranked, again = train(tmp_path / "two", "dpo", data, "cluster.devices=2", steps=5)
    for found, wanted in zip(again, reports, strict=True):
        assert found.metrics["dpo/loss"] == pytest.approx(wanted.metrics["dpo/loss"], rel=1e-3)
    for name, weight in weights(run).items():
        assert (weights(ranked)[name] - weight).norm() <= 5e-3 * weight.norm(), name


@pytest.mark.timeout(180)
def test_rows_without_a_pair_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [*pairs(40), {"id": "mine", "prompt": "a", "completion": "b"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(WorkerError, match=r"rows\.jsonl, line 41: .* `chosen` and `rejected`"):
        train(tmp_path / "run", "dpo", f"data.path={path}", "data.held_out=0", steps=1)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("workflow", ["reward_model", "dpo"])
def test_pairs_that_are_too_long_are_left_out_and_counted_when_asked(workflow: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    long = {"prompt": "write", "chosen": "1" * 90, "rejected": "a"}
    path.write_text("\n".join(json.dumps(row) for row in [*pairs(15), long]), encoding="utf-8")
    changes = (
        "trainer.micro_batch_tokens=64",
        "loop.batch_size=16",
        "data.held_out=0.0",
        "loop.eval_every=0",
    )
    skipping = (*changes, 'trainer.on_too_long="skip"')
    _, reports = train(tmp_path / "runs", workflow, f"data.path={path}", *skipping, steps=1)
    assert reports[-1].metrics[f"{workflow}/skipped_samples"] == 1
    assert reports[-1].metrics[f"{workflow}/samples"] == 15
    with pytest.raises(WorkerError, match=r"pairs/15: .* the limit is 64.*on_too_long"):
        train(tmp_path / "refused", workflow, f"data.path={path}", *changes, steps=1)
