"""Guards in a real run: what is planted is named on the terminal, in the run folder and in the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rill.dashboard import indexer
from rill.errors import GuardError, RunError, StuckError
from rill.telemetry.jsonl import read_lines
from rill.telemetry.run import RunStatus
from tests.e2e.tiny import as_command


def test_a_constant_reward_logprobs_that_are_not_the_engines_and_a_full_disk_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([9.0, 0.5, 0.5, 0.5])  # at steps 0 and 1, and twice while the run waits for room
    monkeypatch.setattr(
        "rill.telemetry.guards.room_left",
        lambda *_: {"disk/checkpoints_left": next(left, 9.0), "memory/available": 0.02},
    )
    monkeypatch.setattr("rill.telemetry.guards.PAUSE_POLL_S", 0.01)
    run = as_command(
        tmp_path,
        "wrong",
        "rollout.env.type=tests.e2e.faults:WrongLogprobs",
        "rollout.env.reward.type=function",
        "rollout.env.reward.function=tests.e2e.rewards:constant",
        "loop.checkpoint_every=0",
    )
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert findings["mismatch"]["step"] == 2
    assert "disagree about the same tokens" in findings["mismatch"]["meaning"]
    assert findings["no signal"]["step"] == 2, "it speaks after two steps in a row"
    assert (findings["disk"]["step"], findings["disk"]["action"]) == (1, "pause")
    assert findings["memory"]["step"] == 0
    assert findings["no update"]["step"] == findings["truncated answers"]["step"] == 3
    assert "disk/checkpoints_left is well again" in run.log_path.read_text()
    assert "**Group size?**\n4 samples a prompt" in (run.path / "run_card.md").read_text()
    printed = capfd.readouterr().out
    assert printed.count("guard: step 2: no signal: reward/std is 0") == 1
    assert re.search(r"guards +\d+ findings, told above and in the report", printed), "counted in the summary"
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "the reward does not see the answer" in page
    shown = indexer.rollouts(run.path)
    groups = (shown.group(0, number) for number in range(shown.num_groups))
    for sample in next(group for group in groups if not group.get("evaluates"))["samples"]:
        pairs = zip(sample["trainer_logprobs"], sample["logprobs"], strict=True)
        assert any(abs(found - said) > 0.1 for found, said in pairs if found is not None), (
            "token by token too"
        )


@pytest.mark.slow
def test_a_hanging_reward_is_counted_and_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run = as_command(
        tmp_path,
        "hanging",
        "rollout.env.reward.function=tests.e2e.faults:hanging",
        "rollout.env.scoring.timeout_s=1",
        "eval.num_prompts=0",
        "loop.checkpoint_every=0",
    )
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert "failing rewards" in findings
    assert run.state().status is RunStatus.FINISHED


@pytest.mark.slow
def test_a_part_that_is_stuck_ends_the_run_with_who_waits_for_whom(tmp_path: Path) -> None:
    with pytest.raises(StuckError) as stuck:
        as_command(tmp_path, "stuck", "rollout.env.type=tests.e2e.faults:Stuck", "loop.step_timeout_s=60")
    message = str(stuck.value)
    assert "rollout" in message
    (report,) = (tmp_path / "stuck" / "logs").glob("stuck-*.md")
    assert str(report) in message


@pytest.mark.slow
def test_samples_under_another_groups_id_end_the_run_at_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="step 1: misplaced samples: groups/misplaced is 16"):
        as_command(tmp_path, "shuffled", "workflow=tests.e2e.faults:Shuffled")


@pytest.mark.slow
def test_an_attention_mask_that_leaks_is_named_by_the_canary_and_without_it_by_a_guard(
    tmp_path: Path,
) -> None:
    leaking = "workflow=tests.e2e.faults:Leaking"
    with pytest.raises(
        RunError, match="answers with other weights: log-probabilities of 62 fixed tokens differ"
    ):
        as_command(tmp_path, "proven", leaking, "loop.max_relaunches=1")
    run = as_command(tmp_path, "unproven", leaking, "sync.canary=false")
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert findings["mismatch"]["step"] == 2 and "a mask that leaks" in findings["mismatch"]["meaning"]


PLANTED = {
    "log-probabilities of another policy": (
        (
            "rollout.env.type=tests.e2e.faults:WrongLogprobs",
            "rollout.env.factor=3",
            "algorithm.correction=mis",
        ),
        {"mismatch tail": 2, "masked tokens": 2},
    ),
    "a reward and a length that change at once": (
        ("rollout.env.type=tests.e2e.faults:Turncoat", "loop.steps=13"),
        {"reward jump": 12, "length drift": 12},
    ),
    "answers of one token": (("rollout.sampling.max_new_tokens=1",), {"empty answers": 3}),
}
"""Settings, and the guards that name them with the latest step by which they do."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_named_by_its_guards(tmp_path: Path, fault: str) -> None:
    settings, expected = PLANTED[fault]
    run = as_command(tmp_path, "planted", *settings, "eval.num_prompts=0", "loop.checkpoint_every=0")
    found = {
        finding["guard"]: finding["step"] for finding in reversed(list(read_lines(run.path / "guards.jsonl")))
    }
    for guard, latest in expected.items():
        assert found.get(guard, 1 << 30) <= latest, (guard, found)
