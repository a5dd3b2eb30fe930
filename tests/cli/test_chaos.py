"""`rill chaos`: what it does to a run is stored, and a promise that is broken is named."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from rill.cli.chaos import CHAOS_FILE, Harness, _batches, _first, _records, _tools
from rill.cli.main import app
from rill.journal.reader import LogReader
from rill.journal.records import Finished
from rill.journal.token_log import JournalConfig, TokenLog
from rill.telemetry.metrics import METRICS_FILE
from rill.telemetry.run import Run
from rill.types import StopReason

RECIPE = "tests/e2e/tiny.toml"


def finished_run(folder: Path, batches: dict[int, list[int]], *, without: str = "") -> Run:
    """A folder whose token log has these batches, and two answers to each of their prompts."""
    run = Run.create("r", root=folder)
    log = TokenLog(run.path, "controller", JournalConfig())
    said = np.ones(2, np.int32)
    for step, indices in batches.items():
        log.event("controller", f"batch/{step}", indices)
        for name in (f"g{index:08d}/{n}" for index in indices for n in range(2)):
            if name != without:
                number = log.open(f"{name}#policy/1", num_prompt=2, base=0)
                end = Finished(number, 2, StopReason.EOS, None, said, -said.astype(np.float32), said)
                log.finish(end, None, lambda error: None)
    log.close()
    return run


def log_of(run: Run) -> LogReader:
    reader = LogReader(run.path)
    reader.read_all()
    return reader


def test_a_group_in_two_batches_a_missing_answer_and_a_tool_run_twice_are_named(tmp_path: Path) -> None:
    good = finished_run(tmp_path / "good", {0: [0, 1], 1: [2, 3]})
    assert [
        _first(_batches(log_of(good), 2, 2)),
        _first(_records(log_of(good), 2)),
        _first(_tools(good)),
    ] == [True] * 3
    twice = finished_run(tmp_path / "twice", {0: [0, 1], 1: [1, 3]})
    assert _first(_batches(log_of(twice), 2, 2)) == "group 1 is in the batches of steps 0 and 1"
    assert _first(_batches(log_of(good), 3, 2)) == "2 of 3 batches"
    lost = finished_run(tmp_path / "lost", {0: [0, 1]}, without="g00000001/1")
    assert _first(_records(log_of(lost), 2)) == "answer g00000001/1 was trained on and is not in the log"
    log = TokenLog(good.path, "env-0", JournalConfig())
    for value in ("begun", {"result": "paid"}, {"result": "paid again"}):
        log.event("g00000001/0", "tool/policy/1/1", value)
    log.close()
    assert _first(_tools(good)) == "tool/policy/1/1 of g00000001/0 has two results"


def test_a_kind_of_fault_that_there_is_not_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(app, ["chaos", RECIPE, "--kinds", "flood", "--root", str(tmp_path)])
    assert result.exit_code == 2 and "kill, stop, slow" in result.output and not list(tmp_path.iterdir())
    monkeypatch.setattr("rill.cli.chaos.SMALL_DISK_BYTES", 0)
    result = CliRunner().invoke(app, ["chaos", RECIPE, "--kinds", "disk", "--root", str(tmp_path)])
    assert (result.exit_code, "on a larger" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["chaos", "tests/e2e/tiny_sft.toml", "--root", str(tmp_path)])
    assert result.exit_code == 2 and "keeps no token log" in result.output and not list(tmp_path.iterdir())


def test_an_undisturbed_run_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    command = ["chaos", RECIPE, "loop.steps=100000", "--root", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, "--timeout", "1"])
    assert result.exit_code == 2 and "has not ended after 1 s: give more (--timeout)" in result.output
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or ())]
    for wrong in (["--every", "0"], ["--timeout", "-1"], ["--faults", "-1"]):
        assert wrong[0] in CliRunner().invoke(app, [*command, *wrong]).output


def hurt(folder: Path, *arguments: str) -> tuple[str, dict[str, object]]:
    result = CliRunner().invoke(app, ["chaos", RECIPE, *arguments, "--root", str(folder)])
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "chaos-0-hurt" / CHAOS_FILE).read_text())
    assert found["faults"], "it was hurt"
    return result.output, found


@pytest.mark.timeout(900)
def test_a_hurt_run_keeps_every_promise(tmp_path: Path) -> None:
    output, found = hurt(
        tmp_path, "loop.steps=12", "algorithm.correction=tis", "--faults", "2", "--every", "0.5"
    )
    assert found["held"]["the weights are the same to the last bit"] is True, output  # type: ignore[index]
    for fault in found["faults"]:  # type: ignore[attr-defined]
        line = rf"{fault['at_s']:.1f} s  step \d+/12 +{fault['kind']} {re.escape(fault['target'])}\n"
        assert re.search(line, output), output


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "settings",
    [
        ("loop.steps=600", "loop.checkpoint_every=20", "rollout.env_workers=1", "algorithm.correction=tis"),
        ("loop.steps=600", "loop.checkpoint_every=20", "cluster.devices=2", "placement.rollout=0",
         "placement.actor=1", "loop.max_lag=2"),
        ("loop.steps=300", "loop.checkpoint_every=20", "workflow=ppo", "algorithm.type=ppo"),
        ("loop.steps=300", "loop.checkpoint_every=20", "cluster.devices=2", "placement.rollout=0",
         "placement.actor=1", "loop.max_lag=2", "rollout.env.type=tests.e2e.faults:Paying",
         "rollout.env.reward={type='function',function='tests.e2e.rewards:share_of_digits',run_in='inline'}"),
    ],
    ids=["synchronous, environments apart", "asynchronous", "four models", "tools"],
)  # fmt: skip
def test_hundreds_of_faults_lose_nothing(tmp_path: Path, settings: tuple[str, ...]) -> None:
    hurt(tmp_path, *settings, "--faults", "300", "--every", "1", "--timeout", "6000")


class OneStepASecond:
    """A run of `num_steps`, as the harness sees it; time passes while it is waited for."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path, self.process = path, self
        self._time_s, self._num_steps, self._num_told = 0.0, num_steps, 0
        self.num_kills = self.num_resumed = 0
        self.everybody: dict[int, psutil.Process] = {}
        self._is_dying = self._is_dead = False

    def kill(self) -> None:
        """The kernel takes a moment for it."""
        self._is_dying = True

    def resume(self) -> None:
        self._is_dying = self._is_dead = False
        self.num_resumed += 1

    def wait(self, timeout_s: float | None = None) -> int:
        if self._is_dying and timeout_s is None:
            self._is_dead = True
        if self._is_dead:
            return -signal.SIGKILL
        assert timeout_s is not None
        self._time_s += timeout_s
        num_done = min(self._num_steps, int(self._time_s))
        if num_done > self._num_told:
            rows = [json.dumps({"step": step + 1, "time_s": 0.0, "values": {}}) for step in range(num_done)]
            (self.path / METRICS_FILE).write_text("".join(f"{row}\n" for row in rows))
            self._num_told = num_done
        if num_done < self._num_steps:
            raise subprocess.TimeoutExpired("rill", timeout_s)
        return 0

    def workers(self) -> dict[str, OneStepASecond]:
        return {"rollout[0]": self}

    def send_signal(self, number: int) -> None:
        self.num_kills += number == signal.SIGKILL


def test_all_faults_come_before_the_run_ends_where_its_steps_allow_it(tmp_path: Path) -> None:
    run = OneStepASecond(tmp_path, num_steps=200)
    done = Harness(run, random.Random(1), ["kill"], 10.0, 200).run(80, 3600)  # type: ignore[arg-type]
    assert len(done) == run.num_kills == 80
    run = OneStepASecond(tmp_path, num_steps=200)
    done = Harness(run, random.Random(1), ["kill"], 10.0, 200).run(5, 3600)  # type: ignore[arg-type]
    assert len(done) == 5


def test_a_killed_driver_is_resumed_before_anything_else_is_done_to_the_run(tmp_path: Path) -> None:
    run = OneStepASecond(tmp_path, num_steps=100)
    done = Harness(run, random.Random(1), ["driver", "kill"], 2.0, 100).run(40, 3600)  # type: ignore[arg-type]
    num_drivers = sum(fault.kind == "driver" for fault in done)
    assert len(done) == 40 and run.num_resumed == num_drivers > 0
