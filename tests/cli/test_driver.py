from __future__ import annotations

import io
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from rill.cli.driver import Interrupts, carry_out, logged_step
from rill.cli.progress import Progress
from rill.errors import RunError, UserError, WorkerError
from rill.journal.checkpoints import MANIFEST
from rill.journal.reader import LogReader
from rill.journal.token_log import FOLDER, JournalConfig, TokenLog
from rill.telemetry.jsonl import LineFile, encode_line
from rill.telemetry.run import Run, RunStatus
from rill.workflows import WORKFLOWS
from rill.workflows.config import RecipeConfig
from rill.workflows.loop import Observer, StepReport


def step(number: int, phase: str = "step") -> StepReport:
    return StepReport(step=number, num_steps=9, metrics={"reward/mean": number / 10}, phase=phase)


def carried_out(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    story: Callable[[Run, Observer], None],
    resumed: Run | None = None,
    is_log_stale: bool = False,
) -> Run:
    """A run whose workflow only tells a story to its observers."""

    class Workflow:
        def __init__(self, config: RecipeConfig, run: Run, observers: Sequence[Observer]) -> None:
            self._run, self._observers = run, observers

        def run(self) -> None:
            story(self._run, self._tell)

        def _tell(self, report: StepReport) -> None:
            for observer in self._observers:
                observer(report)

    monkeypatch.setattr(WORKFLOWS, "load", lambda name: Workflow)
    if resumed is None:
        run = Run.create("tale", root=root, config_toml="seed = 1\n")
        carry_out(RecipeConfig(workflow="told"), run)
    else:
        run = Run.resume(resumed.path)
        config = RecipeConfig(workflow="told")
        carry_out(config, run, changed_config="seed = 2\n", is_log_stale=is_log_stale)
    return run


def test_a_warm_up_is_logged_before_the_first_step_and_never_over_one() -> None:
    warm_up = [StepReport(step=n, num_steps=500, metrics={}, phase="warm-up") for n in (25, 500)]
    assert [logged_step(report) for report in warm_up] == [-475, 0]
    assert logged_step(step(7)) == 7


def test_a_run_ends_with_its_curves_the_report_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def story(run: Run, tell: Observer) -> None:
        tell(step(1))
        tell(step(9))

    run = carried_out(monkeypatch, tmp_path, story)
    said = capsys.readouterr().out
    assert "0.100 → 0.900   ▁█" in said
    assert (run.path / "report.html").resolve().as_uri() in said
    assert f"rill eval {run.path}, rill serve {run.path}\n" in said, "not by name: it is not in ./runs"
    assert "rill recipes copy" in said


@pytest.mark.parametrize("found_by", ["the driver", "a worker"])
def test_a_mistake_found_before_the_first_figure_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    def story(run: Run, tell: Observer) -> None:
        mistake = UserError("there is no such model")
        if found_by == "the driver":
            raise mistake
        raise WorkerError("broken", group="actor", rank=0, remote_traceback="") from mistake

    with pytest.raises((UserError, WorkerError)):
        carried_out(monkeypatch, tmp_path, story)
    assert list(tmp_path.iterdir()) == []
    assert not logging.getLogger("rill").handlers, "what is said later would go to a folder that is gone"


def test_a_misfortune_keeps_the_folder_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(run: Run, tell: Observer) -> None:
        raise RunError("a worker died")

    with pytest.raises(RunError):
        carried_out(monkeypatch, tmp_path, story)
    assert Run.open("tale", root=tmp_path).state().status is RunStatus.FAILED


def test_a_run_that_fails_later_keeps_everything_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(run: Run, tell: Observer) -> None:
        tell(step(1))
        folder = run.checkpoints_dir / "step-000001"
        folder.mkdir()
        (folder / MANIFEST).write_text("{}")
        raise UserError("row 17 has no answer")

    with pytest.raises(UserError) as failure:
        carried_out(monkeypatch, tmp_path, story)
    run = Run.open("tale", root=tmp_path)
    assert failure.value.__notes__ == [
        f"resume from step 1 with: rill train --resume {run.path}",
        f"report so far: {(run.path / 'report.html').resolve().as_uri()}",
    ]
    assert (run.path / "report.html").exists()


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_between_steps_waits_for_the_end_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = []

    def story(run: Run, tell: Observer) -> None:
        tell(step(1))
        ctrl_c()
        reached.append("the rest of the step")
        tell(step(2))
        reached.append("another step")

    with pytest.raises(KeyboardInterrupt):
        carried_out(monkeypatch, tmp_path, story)
    assert reached == ["the rest of the step"]
    assert "once more ends it at once" in capsys.readouterr().out
    run = Run.open("tale", root=tmp_path)
    assert run.state().status is RunStatus.INTERRUPTED
    assert '"step":2' in run.metrics_path.read_text()


@pytest.mark.parametrize("before", [step(1, "warm-up"), None])
def test_ctrl_c_before_the_first_step_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: StepReport | None
) -> None:
    def story(run: Run, tell: Observer) -> None:
        if before is not None:
            tell(before)
        ctrl_c()
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        carried_out(monkeypatch, tmp_path, story)
    assert [path.name for path in tmp_path.iterdir()] == (["tale"] if before else [])


def test_a_run_that_was_stopped_before_its_first_figure_keeps_what_it_has_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is resumed is never removed: neither by another stop nor by a change that does not work."""

    def samples(run: Run, tell: Observer) -> None:
        log = TokenLog(run.path, "rollout-0", JournalConfig())
        log.event("g00000000/0", "score", 1.0)
        log.close()
        ctrl_c()

    def is_stopped(run: Run, tell: Observer) -> None:
        ctrl_c()

    def fails(run: Run, tell: Observer) -> None:
        raise UserError("there is no such reward")

    with pytest.raises(KeyboardInterrupt) as stopped:
        carried_out(monkeypatch, tmp_path, samples)
    assert any("its tokens are kept" in note for note in stopped.value.__notes__)
    run = Run.open("tale", root=tmp_path)
    for story in (is_stopped, fails):
        with pytest.raises((KeyboardInterrupt, UserError)):
            carried_out(monkeypatch, tmp_path, story, resumed=run)
    log = LogReader(run.path)
    log.read_all()
    assert log.events("g00000000/0") == {"score": 1.0}


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(run: Run, tell: Observer) -> None:
        tell(step(1))
        ctrl_c()
        ctrl_c()
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        carried_out(monkeypatch, tmp_path, story)


def test_a_change_that_does_not_work_leaves_a_resumed_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(run: Run, tell: Observer) -> None:
        tell(step(1))

    def fails(run: Run, tell: Observer) -> None:
        tell(step(1, "restart"))  # it may pass over a damaged checkpoint before it fails
        raise UserError("the checkpoint does not fit")

    run = carried_out(monkeypatch, tmp_path, works)
    with pytest.raises(UserError):
        carried_out(monkeypatch, tmp_path, fails, resumed=run)
    assert run.config_path.read_text() == "seed = 1\n"
    assert '"step":1' in run.metrics_path.read_text()
    carried_out(monkeypatch, tmp_path, works, resumed=run)
    assert run.config_path.read_text() == "seed = 2\n"


def test_a_change_of_what_is_sampled_has_a_log_of_its_own_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(run: Run, what: str) -> None:
        (run.path / FOLDER).mkdir(exist_ok=True)
        (run.path / FOLDER / f"{what}.log").touch()

    def begins(run: Run, tell: Observer) -> None:
        tell(step(1))
        checkpoint = run.checkpoints_dir / "step-000001"
        checkpoint.mkdir()
        (checkpoint / MANIFEST).write_text("{}")
        sampled(run, "old")

    def ends(run: Run, how: BaseException) -> None:
        assert run.config_path.read_text() == "seed = 2\n" and not (run.path / FOLDER).exists()
        sampled(run, "new")
        raise how

    def log_of(run: Run) -> list[str]:
        return [path.stem for path in (run.path / FOLDER).iterdir()]

    run = carried_out(monkeypatch, tmp_path, begins)
    with pytest.raises(RunError):
        story = partial(ends, how=RunError("it does not fit"))
        carried_out(monkeypatch, tmp_path, lambda r, tell: story(r), resumed=run, is_log_stale=True)
    assert (run.config_path.read_text(), log_of(run)) == ("seed = 1\n", ["old"]), "as it was"
    with pytest.raises(KeyboardInterrupt):
        story = partial(ends, how=KeyboardInterrupt())
        carried_out(monkeypatch, tmp_path, lambda r, tell: story(r), resumed=run, is_log_stale=True)
    assert (run.config_path.read_text(), log_of(run)) == ("seed = 2\n", ["new"]), "as a kill leaves it"


def test_what_a_part_warns_of_is_seen_while_it_happens_and_a_guard_speaks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def story(run: Run, tell: Observer) -> None:
        logging.getLogger("rill.workflows.fleet").warning("rollout[0] is lost; relaunch %d", 1)
        logging.getLogger("rill.workflows.fleet").warning("rollout[1] is lost\nTraceback …")
        logging.getLogger("rill.telemetry.guards").warning("entropy is low")
        tell(step(9))

    run = carried_out(monkeypatch, tmp_path, story)
    said = capsys.readouterr().out
    assert "warning: rollout[0] is lost; relaunch 1\n" in said and "entropy" not in said
    assert "warning: rollout[1] is lost … (see log.txt)\n" in said and "Traceback" not in said
    assert "relaunch 1" in run.log_path.read_text() and "entropy" in run.log_path.read_text()


def test_a_run_in_which_nothing_worked_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(run: Run, tell: Observer) -> None:
        tell(step(1))
        failed = {"tokens": ["2+2="], "sampled": [0], "reward": 0.0, "error": "environment: ValueError: bug"}
        group = {"version": -1, "group": "g0", "samples": [failed]}
        LineFile(run.rollouts_dir / "rollout-0.jsonl").write(encode_line(group))
        raise RunError("the batch has no token to train on")

    with pytest.raises(RunError) as failure:
        carried_out(monkeypatch, tmp_path, story)
    notes = failure.value.__notes__
    assert "every answer of the newest group failed: environment: ValueError: bug" in notes


def test_a_resumed_run_that_had_no_step_left_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def story(run: Run, tell: Observer) -> None:
        tell(step(9))
        folder = run.checkpoints_dir / "step-000009"
        folder.mkdir()
        (folder / MANIFEST).write_text("{}")

    run = carried_out(monkeypatch, tmp_path, story)
    assert "raise loop.steps" not in capsys.readouterr().out
    carried_out(monkeypatch, tmp_path, lambda run, tell: None, resumed=run)
    assert "raise loop.steps to go on" in capsys.readouterr().out


def test_the_summary_of_a_resumed_run_is_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def story(run: Run, tell: Observer) -> None:
        warm_up = {"sft/loss": 2.0}
        tell(StepReport(step=9, num_steps=9, metrics=warm_up, phase="warm-up"))
        tell(step(1))
        folder = run.checkpoints_dir / "step-000001"
        folder.mkdir()
        (folder / MANIFEST).write_text("{}")

    run = carried_out(monkeypatch, tmp_path, story)
    capsys.readouterr()
    carried_out(monkeypatch, tmp_path, lambda run, tell: tell(step(5)), resumed=run)
    said = capsys.readouterr().out
    assert "reward           0.100 → 0.500" in said
    assert "loss" not in said, "a warm-up's figures say nothing once RL has begun"


def test_a_run_that_waits_for_room_says_so_before_it_waits_and_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    moved: list[int] = []

    def room_left(*_: object) -> dict[str, float]:
        said.append(capsys.readouterr().out)
        if len(said) == 3:  # steps 1 and 2, and the first look while it waits
            ctrl_c()
        return {"disk/checkpoints_left": 9.0 if len(said) == 1 else 0.5, "memory/available": 0.5}

    def story(run: Run, tell: Observer) -> None:
        tell(step(1))
        tell(step(2))

    monkeypatch.setattr("rill.telemetry.guards.room_left", room_left)
    monkeypatch.setattr("rill.telemetry.guards.PAUSE_POLL_S", 0.01)
    monkeypatch.setattr("rill.telemetry.guards.PAUSE_S", 2.0)
    monkeypatch.setattr("rill.cli.driver.StallWatch.observe", lambda self, report: moved.append(report.step))
    with pytest.raises(KeyboardInterrupt):
        carried_out(monkeypatch, tmp_path, story)
    assert "The run waits until there is room" in said[2]
    assert moved == [1, 2, 2], "nobody is said to be stuck"


def test_a_step_that_does_not_end_in_its_grace_is_given_up() -> None:
    interrupts = Interrupts(Progress(Console(file=io.StringIO())), grace_s=0.05)
    with interrupts.listening():
        interrupts.observe(step(1))
        signal.raise_signal(signal.SIGTERM)  # a wish: the step goes on
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)


def test_a_signal_that_is_sent_twice_at_once_is_one_wish() -> None:
    """`timeout` signals the group, and `make` in it signals its child again."""
    interrupts = Interrupts(Progress(Console(file=io.StringIO())))
    with interrupts.listening():
        interrupts.observe(step(1))
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.observe(step(2))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # a person who means it
