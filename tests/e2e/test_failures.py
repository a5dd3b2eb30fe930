"""One run that loses, one after another, an engine, its trainer, both at once and its driver, beside one that loses
nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rill.errors import RunError
from rill.journal.reader import LogReader
from rill.journal.token_log import FOLDER
from rill.telemetry.metrics import read_metrics
from rill.telemetry.run import Run, RunStatus
from rill.workflows.loop import StepReport
from tests import child
from tests.e2e.tiny import EXACT, INVARIANT, PPO, RECIPE, STEPS, fingerprint, resume, start

DEADLINE_S = 240.0


class Command:
    """`rill train …` as a user starts it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        environment = child.environment(PYTHONUNBUFFERED="1")
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from rill.cli.main import main; main()", "train", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.family: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.output
            steps = [int(found) for found in re.findall(r"^step (\d+)/", self.output, re.MULTILINE)]
            return max(steps, default=-1) >= step

        wait_until(is_there, f"step {step}", lambda: self.output)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family[process.pid] = process

    def wait_for(self, text: str) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.output
            return text in self.output

        wait_until(is_there, text, lambda: self.output)

    def pid(self, worker: str) -> int:
        """Of a worker, by its process's name."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family[process.pid] = process
        names = {process.name(): pid for pid, process in self.family.items() if process.is_running()}
        found = [pid for name, pid in names.items() if name.startswith(worker)]
        assert found, f"no process {worker} among {sorted(names)}"
        return found[0]

    def kill(self, worker: str) -> None:
        os.kill(self.pid(worker), signal.SIGKILL)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def check_nobody_is_left(self) -> None:
        def is_gone(process: psutil.Process) -> bool:
            try:
                return process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        wait_until(lambda: all(map(is_gone, self.family.values())), "the workers' end", lambda: self.output)


def wait_until(is_true: Callable[[], bool], what: str, explain: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"no {what}:\n{explain()}"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_token_log_never_lies_beside_settings_that_it_was_not_sampled_with(tmp_path: Path) -> None:
    """A run is resumed with a change while it runs; with one, and killed in its first step; and with one that fails."""

    def log_of(run: Run) -> set[str]:
        return {path.name for path in (run.path / FOLDER).glob("*.log")}

    first = Command(tmp_path, str(RECIPE), "loop.steps=4000", "--name", "hurt", "--root", str(tmp_path))
    first.wait_for_step(3)
    run = Run.open("hurt", root=tmp_path)
    old = log_of(run)
    second = Command(tmp_path, "--resume", str(run.path), "rollout.sampling.temperature=0.7")
    assert second.wait() == 2 and "is being run by process" in second.output
    assert old and old <= log_of(run), "its log was not touched"
    first.process.kill()
    first.wait()
    first.check_nobody_is_left()

    slow = "rollout.env.reward.function=tests.e2e.rewards:slowly"
    third = Command(tmp_path, "--resume", str(run.path), slow)
    wait_until(lambda: bool(log_of(run) - old), "a new log", lambda: third.output)
    assert not log_of(run) & old and "\nstep" not in third.output
    third.process.kill()
    third.wait()
    assert "rewards:slowly" in run.config_path.read_text(), "what the new log was sampled with"

    newer = log_of(run)
    fourth = Command(tmp_path, "--resume", str(run.path), "loop.max_lag=2")
    assert fourth.wait() != 0 and "loop.max_lag = 2 lets engines go on" in fourth.output
    assert log_of(run) == newer and "max_lag = 0" in run.config_path.read_text(), "it is as it was"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_token_log_that_is_damaged_is_told_at_the_resume_and_the_run_ends_whole(tmp_path: Path) -> None:
    """While somebody looks at the run; its weights go by a folder in which it has published before."""
    settings = (
        "loop.steps=12",
        "loop.max_lag=1",
        "cluster.devices=2",
        "placement.rollout=0",
        "placement.actor=1",
    )
    weights = ("sync.transport.type=disk", f"sync.transport.folder={tmp_path / 'weights'}")
    first = Command(tmp_path, str(RECIPE), *settings, *weights, "--name", "hurt", "--root", str(tmp_path))
    first.wait_for_step(3)
    first.process.kill()
    first.wait()
    first.check_nobody_is_left()
    run = Run.open("hurt", root=tmp_path)
    (log,) = (run.path / FOLDER).glob("rollout-*.log")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    again = Command(tmp_path, "--resume", str(run.path))
    while again.process.poll() is None:
        assert run.state().status in (RunStatus.RUNNING, RunStatus.INTERRUPTED, RunStatus.FINISHED)
        time.sleep(0.01)
    assert again.wait() == 0, again.output
    assert f"the token log is damaged, and what was lost is sampled again: {log.name}" in again.output
    again.check_nobody_is_left()
    assert [row.step for row in read_metrics(run.path)] == list(range(13))
    (of_this_machine,) = (tmp_path / "weights").iterdir()
    assert list(of_this_machine.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_killing_an_engine_the_trainer_both_and_the_driver_changes_no_bit_of_the_result(
    whole: Run, tmp_path: Path
) -> None:
    settings = (*EXACT, "loop.checkpoint_every=3", "journal.keep=true")
    first = Command(tmp_path, str(RECIPE), *settings, "--name", "hurt", "--root", str(tmp_path))
    first.wait_for_step(1)
    first.kill("rollout[0]")
    first.wait_for_step(4)
    engine = first.pid("rollout[0]")
    first.kill("actor[0]")
    first.wait_for("actor[0] lost: going on from step 3 and the token log")
    first.wait_for_step(5)
    assert first.pid("rollout[0]") == engine, "the engine stayed"
    first.kill("actor[0]")
    first.kill("rollout[0]")
    told = "lost: going on from step"  # of the trainer alone above; of whichever is seen first now
    wait_until(lambda: "\nstep " in "".join(first.output.split(told)[2:]), "step", lambda: first.output)
    assert first.pid("rollout[0]") != engine
    first.process.kill()
    first.wait()
    first.check_nobody_is_left()
    run = Run.open("hurt", root=tmp_path)
    assert run.state().status is RunStatus.INTERRUPTED
    assert "rollout[0] is lost" in run.log_path.read_text()

    half = run.checkpoints_dir / "step-000001"
    half.mkdir()  # as a driver leaves it that is killed while one is written, or removed
    second = Command(tmp_path, "--resume", str(run.path))
    assert second.wait() == 0, second.output
    assert not half.exists(), "it takes room for ever"
    assert fingerprint(run) == fingerprint(whole)
    steps = [row.step for row in read_metrics(run.path)]
    assert steps == sorted(set(steps)), "steps that were taken again stand in the log once"
    assert check_log(run, prompts_per_step=4, group_size=4) == STEPS


@pytest.mark.timeout(600)
def test_a_trainer_that_is_lost_in_the_warm_up_goes_on_with_it_and_so_does_a_resumed_run(
    tmp_path: Path,
) -> None:
    settings = ("sft.steps=40", "loop.steps=1", INVARIANT)
    told: list[StepReport] = []

    def hurt(report: StepReport) -> None:
        told.append(report)
        if report.phase == "warm-up" and report.step == 20 and len(told) == 10:
            actor = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("actor[0]")]
            actor[0].kill()
        if report.phase == "warm-up" and report.step == 30:
            raise RunError("stopped by the test")

    with pytest.raises(RunError, match="stopped by the test"):
        start(tmp_path, "hurt", *settings, observers=[hurt])
    [restart] = [number for number, report in enumerate(told) if report.phase == "restart"]
    assert "actor[0] lost: going on from the warm-up, " in told[restart].notes[0]
    assert 4 <= told[restart + 1].step <= 22
    later: list[StepReport] = []
    run = resume(Run.open("hurt", root=tmp_path), observers=[later.append])
    assert later[0].phase == "warm-up" and later[0].step >= 4 and later[-1].step == 1
    assert fingerprint(run) == fingerprint(start(tmp_path, "calm", *settings))


def check_log(run: Run, *, prompts_per_step: int, group_size: int) -> int:
    """Every batch has groups of its own, and the token log has every answer of them to its end; how many batches."""
    reader = LogReader(run.path)
    reader.read_all()
    batches = reader.batches()
    indices = [index for batch in batches.values() for index in batch]
    assert len(set(indices)) == len(indices) == prompts_per_step * len(batches)
    finished = [name for name, sequence in reader.sequences() if sequence.is_finished]
    for index in indices:
        assert sum(name.startswith(f"g{index:08d}/") for name in finished) == group_size
    assert not reader.damages()
    return len(batches)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "placement",
    [
        ("cluster.devices=2", "placement.rollout=0-1", "placement.actor=0-1"),
        ("cluster.devices=3", "placement.rollout=0-1", "placement.actor=2", "loop.max_lag=2"),
    ],
    ids=["two engines and two trainer ranks share devices", "two engines run ahead"],
)
def test_a_killed_engine_comes_back_in_every_placement(tmp_path: Path, placement: tuple[str, ...]) -> None:
    steps = "loop.steps=12"
    command = Command(tmp_path, str(RECIPE), steps, *placement, "--name", "hurt", "--root", str(tmp_path))
    command.wait_for_step(2)
    command.kill("rollout[1]")
    assert command.wait() == 0, command.output
    run = Run.open("hurt", root=tmp_path)
    rows = [row for row in read_metrics(run.path) if "groups/kept" in row.values]
    assert [row.values["groups/kept"] for row in rows] == [4.0] * 12
    assert rows[-1].values["sync/relaunches"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_that_run_ahead_and_environments_stay_when_the_trainer_is_lost(tmp_path: Path) -> None:
    apart = ("cluster.devices=3", "placement.rollout=0-1", "placement.actor=2", "rollout.env_workers=1")
    settings = ("loop.steps=40", "loop.max_lag=2", "loop.checkpoint_every=3", "journal.keep=true", *apart)
    command = Command(tmp_path, str(RECIPE), *settings, "--name", "hurt", "--root", str(tmp_path))
    command.wait_for_step(4)
    stay = ("rollout[0]", "rollout[1]", "env[0]")
    before = [command.pid(name) for name in stay]
    command.kill("actor[0]")
    command.wait_for("actor[0] lost: going on from step")
    command.wait_for_step(7)
    assert [command.pid(name) for name in stay] == before
    assert command.wait() == 0, command.output
    assert check_log(Run.open("hurt", root=tmp_path), prompts_per_step=4, group_size=4) == 40


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("worker", ["critic", "reference", "controller"])
def test_a_killed_critic_reference_or_controller_is_replaced_and_the_weights_are_the_same(
    tmp_path: Path, worker: str
) -> None:
    settings = (*EXACT, *PPO)
    undisturbed = start(tmp_path, "undisturbed", *settings)
    hurt = Command(
        tmp_path, str(RECIPE), *settings, "loop.checkpoint_every=1", "--name", "hurt", "--root", str(tmp_path)
    )
    hurt.wait_for_step(3)
    hurt.kill(f"{worker}[0]")
    hurt.wait_for(f"{worker}[0] lost: going on from step")
    assert hurt.wait() == 0, hurt.output
    assert fingerprint(Run.open("hurt", root=tmp_path)) == fingerprint(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_reward_process_is_started_again_and_costs_no_group(tmp_path: Path) -> None:
    pooled = ("rollout.env.reward.run_in=process", "loop.steps=8")
    command = Command(tmp_path, str(RECIPE), *pooled, "--name", "hurt", "--root", str(tmp_path))
    command.wait_for_step(2)
    rewards = [
        pid
        for pid, p in command.family.items()
        if p.is_running() and "rill.envs.child" in " ".join(p.cmdline())
    ]
    assert rewards, [p.cmdline() for p in command.family.values() if p.is_running()]
    for pid in rewards:
        os.kill(pid, signal.SIGKILL)
    assert command.wait() == 0, command.output
    rows = [row for row in read_metrics(tmp_path / "hurt") if "groups/kept" in row.values]
    assert [row.values["groups/kept"] for row in rows] == [4.0] * 8
