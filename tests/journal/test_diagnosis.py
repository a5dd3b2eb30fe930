"""`rill doctor RUN`: what is wrong is said in words, from the files alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from rill.journal.diagnosis import Severity, diagnose
from rill.journal.reader import segments
from rill.journal.token_log import FOLDER, JournalConfig, TokenLog
from rill.telemetry.guards import GuardWatch, default_guards
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run, RunStatus


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create("sick", root=tmp_path)
    log = MetricLog(made.path, [])
    for step in range(1, 4):
        log.write(step, {"reward/mean": 0.5})
    log.close()
    return made


def said(run: Run) -> str:
    return "\n".join(f"{d.severity.name} {d.what} | {d.since} | {d.advice}" for d in diagnose(run))


def test_of_a_healthy_run_nothing_bad_is_said(run: Run) -> None:
    run.set_status(RunStatus.FINISHED)
    assert said(run) == ""


def test_a_failed_run_says_why_since_when_and_how_to_go_on(run: Run) -> None:
    run.set_status(RunStatus.FAILED, "StuckError: nobody answers\nstacks …")
    run.close()
    (found,) = diagnose(run)
    assert found.severity is Severity.BROKEN and "nobody answers" in found.what
    assert found.since.startswith("step 3") and run.resume_command in found.advice


def test_what_was_killed_from_outside_is_said_to_be(run: Run) -> None:
    run.close()
    assert "its process ended without saying why" in said(run) and "because memory ran out (`dmesg`" in said(
        run
    )
    run.set_status(RunStatus.FAILED, "PeerDiedError: rollout[0] died during a call: killed by SIGKILL")
    assert "because memory ran out (`dmesg`" in said(run) and "loop.max_relaunches" in said(run)


def test_a_run_that_is_silent_is_found_while_it_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(run) == ""
    (run.path / "logs").mkdir()
    (run.path / "logs" / "stuck-1.md").touch()
    now_s = time.time() + 1000
    monkeypatch.setattr("rill.journal.diagnosis.time.time", lambda: now_s)
    assert "no step for 1" in said(run) and "stuck-1.md says who waits for whom" in said(run)


def test_guards_lost_workers_and_damage_are_told_with_their_beginning(run: Run) -> None:
    guards = GuardWatch(run.path, default_guards(max_lag=0, mismatch_limit=1e-3))
    for step, lag in ((2, 1.0), (3, 0.0), (4, 2.0)):
        guards.check(step, {"lag/max": lag})
    guards.close()
    line = "2026-11-16 09:00:0{} WARNING rill.workflows.fleet: rollout[1] is lost: killed by SIGKILL; relaunch {}\n"
    others = (
        "2026-11-16 09:00:07 WARNING rill.workflows.workflow: controller[0], actor[0] is lost (a died): it goes on\n"
        "2026-11-16 09:00:08 WARNING rill.runtime.cluster: hub (pid 7) ended and was started again: killed\n"
    )
    run.log_path.write_text(line.format(1, 1) + line.format(5, 2) + others, encoding="utf-8")
    log = TokenLog(run.path, "rollout-0", JournalConfig())
    for name in ("g00000001/0#a", "g00000002/0#a"):
        number = log.open(name, num_prompt=3, base=0)
        log.tokens(number, np.arange(4, dtype=np.int32), np.zeros(4, np.float32), np.ones(4, np.int32))
        log.flush()
    log.close()
    run.set_status(RunStatus.INTERRUPTED, "Ctrl-C")
    told = said(run)
    assert "guard lag: lag/max is 2" in told and "step 2, 2 times" in told
    lost = "rollout[1] 2 times, controller[0] 1 time, actor[0] 1 time, hub 1 time | 2026-11-16 09:00:01"
    assert f"processes were lost and started again: {lost}" in told
    assert "2 answers were under way, with 8 tokens in the token log" in told
    (path,) = segments(run.path / FOLDER)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "checksum of the record" in said(run)
    assert json.dumps([d.what for d in diagnose(run)])
