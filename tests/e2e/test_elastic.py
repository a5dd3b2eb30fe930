"""Engines join and leave a run that is running: the weights are those of a run that nobody touched."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.telemetry.run import Run
from rill.workflows.loop import StepReport
from tests.e2e.tiny import EXACT, fingerprint, start

APART = ("cluster.devices=3", "placement.rollout=0", "placement.actor=1", "loop.step_timeout_s=120")


class Visitor:
    """Does at some steps what a person at another terminal would do. Waits for the run's answer between steps, so the
    run, which answers from its own thread, is not kept."""

    def __init__(self, root: Path, name: str) -> None:
        self._arguments = ["--root", str(root), "--timeout", "100"]
        self._name = name
        self.said: list[str] = []
        self.num_engines: list[float] = []
        self._threads: list[threading.Thread] = []

    def observe(self, report: StepReport) -> None:
        if "sync/engines" in report.metrics:
            self.num_engines.append(report.metrics["sync/engines"])
        if report.step == 1:
            self._ask("join", self._name)
        if report.step == 3:
            self._ask("leave", self._name, "0")
        if report.step == 4:
            self._ask("join", self._name, "--devices", "0")
        if report.step == 6:
            os.kill(process_of("rollout[1]").pid, signal.SIGTERM)

    def wait(self) -> list[str]:
        for thread in self._threads:
            thread.join(100)
        return self.said

    def _ask(self, *words: str) -> None:
        """The request is there when this returns: the run sees it before its next step."""
        self.wait()
        folder = self._folder()
        before = len(list(folder.glob("*.json"))) if folder.exists() else 0
        thread = threading.Thread(target=self._call, args=words)
        thread.start()
        self._threads.append(thread)
        while thread.is_alive() and not (folder.exists() and len(list(folder.glob("*.json"))) > before):
            thread.join(0.01)

    def _folder(self) -> Path:
        return Path(self._arguments[1]) / self._name / "requests"

    def _call(self, *words: str) -> None:
        self.said.append(CliRunner().invoke(app, ["engine", *words, *self._arguments]).output.strip())


def process_of(name: str) -> psutil.Process:
    (found,) = [p for p in psutil.Process().children(recursive=True) if p.name().startswith(name)]
    return found


@pytest.mark.timeout(300)
def test_engines_join_leave_and_are_preempted_and_no_bit_of_the_weights_changes(
    whole: Run, tmp_path: Path
) -> None:
    visitor = Visitor(tmp_path, "visited")
    run = start(tmp_path, "visited", *EXACT, *APART, observers=[visitor.observe])
    assert visitor.wait() == [
        "rollout[1] joined: 2 engines",
        "rollout[0] left: 1 engines",
        "rollout[2] joined: 2 engines",
    ]
    assert visitor.num_engines == [1, 2, 2, 1, 2, 2, 1, 1]
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_follow_a_schedule_and_the_load_and_a_synchronous_run_keeps_its_weights(
    whole: Run, tmp_path: Path
) -> None:
    def engines(name: str, *settings: str) -> tuple[Run, list[float]]:
        seen: list[float] = []
        run = start(
            tmp_path,
            name,
            *EXACT,
            *APART,
            *settings,
            observers=[lambda report: seen.append(report.metrics.get("sync/engines", 0.0))],
        )
        return run, seen[1:]

    run, seen = engines("scheduled", "elastic.schedule={2 = 2, 5 = 1}")
    assert seen == [1, 1, 2, 2, 2, 1, 1, 1]
    assert fingerprint(run) == fingerprint(whole)
    _, seen = engines("loaded", "elastic.prompts_per_engine=2", "elastic.max_engines=2", "loop.max_lag=2")
    assert seen[-1] == 2, "four prompts and more are under way"
