"""Guards in a real run: what is planted is named on the terminal, in the run folder and in the report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.dashboard import indexer
from rill.errors import GuardError, RunError, StuckError
from rill.telemetry.jsonl import read_lines
from rill.telemetry.metrics import read_metrics
from rill.telemetry.run import RunStatus
from tests.child import environment
from tests.e2e.faults import foreign_tokenizer
from tests.e2e.tiny import RECIPE, as_command, resolved
from tests.workflows.broken_transport import TRANSPORT


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
    assert findings["no update"]["step"] == findings["truncated answers"]["step"] == 2
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
    assert findings["failing rewards"]["step"] == 2
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


@pytest.mark.slow
def test_stale_weights_are_named_by_the_canary_and_without_it_by_a_guard(tmp_path: Path) -> None:
    stale = "rollout.engine.type=tests.e2e.faults:StaleEngine"
    with pytest.raises(RunError, match=r"rollout\[0\] .*answers with other weights"):
        as_command(tmp_path, "proven", stale, "loop.max_relaunches=1")
    run = as_command(tmp_path, "unproven", stale, "sync.canary=false")
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert findings["mismatch"]["step"] == 3, "the second step is the first with old weights"


@pytest.mark.slow
def test_a_corrupted_bucket_ends_the_run_with_its_engine_and_its_checksum(tmp_path: Path) -> None:
    broken = (f"sync.transport.type={TRANSPORT}", "sync.transport.bucket_bytes=2048")
    with pytest.raises(RunError, match=r"rollout\[0\](.|\n)*checksum differs"):
        as_command(tmp_path, "flipped", *broken, "sync.transport.fault=flipped bit", "loop.max_relaunches=1")


@pytest.mark.slow
def test_a_tokenizer_that_is_not_the_models_is_named_before_the_first_step(tmp_path: Path) -> None:
    settings = foreign_tokenizer(tmp_path, resolved(RECIPE, ()).model)
    command = ["train", str(RECIPE), *settings, "loop.steps=1", "--root", str(tmp_path), "--name", "foreign"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert said.index("is not the tokenizer of") < said.index("step 0/1")


FULL = """
mount -t tmpfs -o size=80m none "$0" || exit 77
(until grep -qs disk "$0/full/guards.jsonl"; do sleep 0.2; done; mount -o remount,size=1g "$0") &
"$@" --root "$0" --name full; code=$?
cat "$0/full/log.txt"
exit $code
"""
"""A disk that is too small for a checkpoint until the guard has said so."""


@pytest.mark.slow
def test_a_run_on_a_disk_that_is_full_waits_until_there_is_room(tmp_path: Path) -> None:
    rill = [sys.executable, "-c", "from rill.cli.main import main; main()", "train", str(RECIPE)]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL, str(tmp_path), *rill],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if "step" not in done.stdout and done.returncode in (1, 77):
        pytest.skip(f"no file system can be mounted here: {done.stdout}")
    assert done.returncode == 0, done.stdout
    assert "guard: step 0: disk: disk/checkpoints_left is 1." in done.stdout
    assert "disk/checkpoints_left is well again" in done.stdout


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_or_is_told_where_such_steps_are_passed_over(
    tmp_path: Path,
) -> None:
    huge = ("rollout.env.reward.function=tests.e2e.faults:huge", "algorithm.type=dr_grpo")
    with pytest.raises(
        RunError, match=r"TrainingError: step 1: the loss or gradient norm \(inf\) is not finite"
    ):
        as_command(tmp_path, "huge", *huge)
    with pytest.raises(GuardError, match="step 5: no finite gradient: grad_norm is inf"):
        as_command(tmp_path, "skipped", *huge, "trainer.on_nonfinite=skip", "loop.steps=6")
    found = [(each["guard"], each["step"]) for each in read_lines(tmp_path / "skipped" / "guards.jsonl")]
    assert ("gradient", 1) in found, found


@pytest.mark.slow
def test_rewards_that_all_fail_end_the_run(tmp_path: Path) -> None:
    failing = ("rollout.env.reward.function=tests.e2e.faults:failing", "eval.num_prompts=0")
    with pytest.raises(RunError, match=r"filters dropped 80 groups \(failed: 80\)") as ended:
        as_command(tmp_path, "failing", *failing)
    assert any("the judge is down" in note for note in ended.value.__notes__)


PLANTED = {
    "log-probabilities of another policy": (
        (
            "rollout.env.type=tests.e2e.faults:WrongLogprobs",
            "rollout.env.factor=4",
            "algorithm.correction=mis",
        ),
        {
            "effective samples": 2,
            "mismatch tail": 2,
            "mismatch kl": 2,
            "mismatch max": 2,
            "masked tokens": 2,
        },
    ),
    "a group that takes six steps where one is allowed": (
        (
            "rollout.env.type=tests.e2e.faults:Late",
            "loop.steps=12",
            "loop.max_lag=1",
            "cluster.devices=2",
            "placement.rollout=0",
            "placement.actor=1",
        ),
        {"lag": 12},  # where the late group is trained on, to the step: see the test
    ),
    "a temperature of almost 0 and a tool that nobody calls": (
        (
            "data.type=vault",
            "rollout.env.type=vault",
            "rollout.sampling={temperature=1e-6,max_new_tokens=80}",
            "loop.steps=3",
        ),
        {"no signal": 2, "repetition": 2, "tools never called": 2, "entropy collapse": 2},
    ),
    "a learning rate far too high": (
        ("trainer.optimizer.learning_rate=0.5", "trainer.num_mini_batches=4", "loop.steps=3"),
        {"large updates": 2},
    ),
    "a batch that is learnt too often": (
        ("trainer.optimizer.learning_rate=0.05", "trainer.num_epochs=4", "loop.steps=3"),
        {"clipped updates": 2},
    ),
    "a reward and a length that change at once": (
        ("rollout.env.type=tests.e2e.faults:Turncoat", "loop.steps=6"),
        {"reward jump": 6, "length drift": 6},
    ),
    "answers of one token": (("rollout.sampling.max_new_tokens=1",), {"empty answers": 2}),
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
    if "lag" in expected:
        late = [row.step for row in read_metrics(run.path) if row.values.get("lag/max", 0.0) > 1]
        assert found["lag"] == late[0]
