"""The driver of one run: a resolved recipe carried out in its folder, watched, and summed up at the end.

Called by `rill train`. Whatever way the run ends, its figures are on disk, its report is written as far as there is
something to show, and the user is told how to go on. A new run that was given something it could not use, before it had
figures, or was stopped before it had sampled anything, leaves no folder behind.

    Ctrl-C once, while steps are taken    the step is finished and a checkpoint saved
    Ctrl-C again, or before the first     the run ends at once
    SIGTERM, SIGHUP                       as Ctrl-C: Slurm, Kubernetes and `timeout` send them before they kill, and
                                          often twice at once (to the group, and by `make`): that counts once
    stop_grace_s after the first          as the second: whoever sent it will not wait for ever
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rill.cli.console import say
from rill.cli.preflight import training_card
from rill.cli.progress import Progress, Screen, curve_lines, history_of
from rill.cli.stall import StallWatch
from rill.dashboard.pages import account_of
from rill.dashboard.report import write_report
from rill.errors import RillError, UserError, mistake_behind
from rill.journal.changes import begin_anew
from rill.journal.checkpoints import newest_size, place_of, step_of, whole_checkpoints
from rill.journal.reader import segments
from rill.journal.records import MAGIC
from rill.journal.token_log import FOLDER
from rill.telemetry import guards, trace
from rill.telemetry.guards import FAILING_REWARDS, Finding, GuardWatch
from rill.telemetry.metrics import MetricLog, read_metrics
from rill.telemetry.rollouts import latest_error, newest_failure, then_and_now
from rill.telemetry.run import RUNS_FOLDER, Run, write_atomically
from rill.telemetry.sinks.base import RunInfo, build_sinks
from rill.workflows import WORKFLOWS
from rill.workflows.config import RecipeConfig
from rill.workflows.loop import StepReport

SAME_WISH_S = 2.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BEFORE_ALL = -(1 << 31)
"""Where a run that is resumed before its first checkpoint begins: no step is kept."""


def carry_out(
    config: RecipeConfig,
    run: Run,
    recipe: str = "RECIPE",
    *,
    changed_config: str | None = None,
    is_log_stale: bool = False,
) -> None:
    """Run a resolved recipe in its folder, showing progress and writing its files.

    `changed_config` replaces a resumed run's saved configuration, once the run has gone on with it: a change that does
    not work leaves the run as it was. `is_log_stale`: from the start, and the token log is set aside.
    """
    try:
        with run.running(), _log_to(run):
            progress, findings = _drive(config, run, changed_config, is_log_stale)
    except (RillError, OSError, KeyboardInterrupt) as error:
        is_new = changed_config is None
        is_mistake = isinstance(error, RillError) and mistake_behind(error) is not None
        was_stopped = isinstance(error, KeyboardInterrupt) and not has_sampled(run)
        if is_new and (is_mistake or was_stopped) and not has_figures(run):
            run.remove()
        _say_what_is_left(run, error)
        raise
    _summarise(config, run, progress, write_report(run), findings, recipe)


def logged_step(report: StepReport) -> int:
    """Where a report stands in the log: a warm-up counts up to 0, where RL begins, so that no step stands for two."""
    return report.step if report.phase == "step" else report.step - report.num_steps


def has_figures(run: Run) -> bool:
    return run.metrics_path.exists() and run.metrics_path.stat().st_size > 0


def has_sampled(run: Run) -> bool:
    """Whether its token log holds anything: a resume goes on from there."""
    return any(path.stat().st_size > len(MAGIC) for path in segments(run.path / FOLDER))


class Interrupts:
    """Turns the first Ctrl-C during the steps into a wish, granted where a step ends; see the module's table."""

    def __init__(self, progress: Progress, grace_s: float = 0.0) -> None:
        """`grace_s`: what the step may still take. 0: as long as it takes."""
        self._progress = progress
        self._grace_s = grace_s
        self._reminder: threading.Timer | None = None
        self._wished_s = 0.0
        """When, by the monotonic clock; 0: not yet."""
        self._takes_steps = False

    def observe(self, report: StepReport) -> None:
        """The last observer of the loop: what is raised here reaches the loop with the step whole and recorded."""
        self._takes_steps = report.phase == "step"
        if self._wished_s:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread, which is somebody else's here
            return
        before = {each: signal.signal(each, self._on_signal) for each in STOP_SIGNALS}
        try:
            yield
        finally:
            if self._reminder is not None:
                self._reminder.cancel()
            for each, handler in before.items():
                signal.signal(each, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._wished_s and number != signal.SIGINT and now_s - self._wished_s < SAME_WISH_S:
            return
        if self._wished_s or not self._takes_steps:
            raise KeyboardInterrupt
        self._wished_s = now_s
        limit = ""
        if self._grace_s:
            limit = f" within {self._grace_s:g} s"
            self._reminder = threading.Timer(self._grace_s, os.kill, (os.getpid(), signal.SIGINT))
            self._reminder.daemon = True
            self._reminder.start()
        self._progress.note(
            f"stopping: this step is finished{limit} and saved first (once more ends it at once)"
        )


class Recorder:
    """Writes down what is reported: figures, and with the first of them the settings that a resumed run has gone on
    with."""

    def __init__(
        self, run: Run, metrics: MetricLog, note: Callable[[str], None], changed_config: str | None
    ) -> None:
        self._run = run
        self._metrics = metrics
        self._note = note
        self.changed_config = changed_config
        """None: there are none, or it has gone on with them."""

    def observe(self, report: StepReport) -> None:
        if report.phase == "restart":
            self.rewind()
        else:
            if self.changed_config is not None:
                write_atomically(self._run.config_path, self.changed_config)
                self.changed_config = None
            self._metrics.write(logged_step(report), report.metrics)
        for note in report.notes:
            self._note(note)

    def rewind(self) -> None:
        """The run goes on from its last checkpoint."""
        checkpoints = whole_checkpoints(self._run)
        self._metrics.rewind(step_of(checkpoints[-1]) if checkpoints else BEFORE_ALL)


def _drive(
    config: RecipeConfig, run: Run, changed_config: str | None, is_log_stale: bool
) -> tuple[Progress, Sequence[Finding]]:
    trace.configure(run.path, "driver")
    told = RunInfo(name=run.name, id=run.id, directory=run.path, config=config.model_dump())
    metrics = MetricLog(run.path, build_sinks(config.sinks, told, say))
    progress = Progress(Screen())
    recorder = Recorder(run, metrics, progress.note, changed_config)
    if whole_checkpoints(run) or has_figures(run):
        recorder.rewind()
    interrupts = Interrupts(progress, config.stop_grace_s)
    stall = StallWatch(progress.note)
    watch = _watch(config, run, progress)

    def machine() -> dict[str, float]:
        return guards.room_left(run.path, newest_size(run))

    def show(report: StepReport) -> None:
        def look_again() -> dict[str, float]:
            interrupts.observe(report)  # the step is whole: who wishes to stop need not wait for room
            stall.observe(report)  # nobody is stuck
            return machine()

        if report.phase != "restart":
            progress.observe(report)
        if report.phase == "step":
            watch.check(report.step, {**report.metrics, **machine()}, look_again)

    observers = [recorder.observe, stall.observe, show, interrupts.observe]
    say(f"run folder: {run.path}")
    if changed_config is not None and not whole_checkpoints(run):
        log = "" if is_log_stale else ", with what the token log holds"
        say(f"it has no whole checkpoint yet: it begins at the start{log}")
    undo = begin_anew(run, changed_config) if changed_config is not None and is_log_stale else None
    try:
        with progress, stall, interrupts.listening(), _warnings_to(progress):
            WORKFLOWS.load(config.workflow)(config, run, observers).run()
        if (run.path / "model").is_dir() and (card := training_card(config, run.id)) is not None:
            card.save(run.path / "model")
    except Exception:
        if undo is not None and recorder.changed_config is not None:
            undo()
        raise
    finally:
        watch.close()
        if config.sinks:
            with suppress(OSError):  # what ended the run is to be told, not this
                metrics.tell(account_of(run))
        metrics.close()
        trace.flush()
    return progress, watch.findings


def _watch(config: RecipeConfig, run: Run, progress: Progress) -> GuardWatch:
    def tell(finding: Finding) -> None:
        progress.note(f"guard: {finding}")
        if finding.guard == FAILING_REWARDS and (error := latest_error(run)):
            progress.note(f"  for example: {error}")

    return GuardWatch(run.path, config.guards(), tell)


def _say_what_is_left(run: Run, error: BaseException) -> None:
    """Notes that the command line prints below the error."""
    if not run.path.exists() or not (has_figures(run) or has_sampled(run)):
        return
    if checkpoints := whole_checkpoints(run):
        error.add_note(f"resume from {place_of(checkpoints[-1])} with: {run.resume_command}")
    else:
        error.add_note(
            f"resume with: {run.resume_command} (no checkpoint yet: its steps are taken again, its tokens are kept)"
        )
    if failure := newest_failure(run):
        error.add_note(f"every answer of the newest group failed: {failure}")
    with suppress(
        OSError, UserError
    ):  # on a full disk the page has to wait; without figures there may be none
        error.add_note(f"report so far: {write_report(run).resolve().as_uri()}")


def _summarise(
    config: RecipeConfig, run: Run, progress: Progress, page: Path, findings: Sequence[Finding], recipe: str
) -> None:
    model = run.path / "model"
    name = run.name if run.path.parent == Path(RUNS_FOLDER) else run.path  # a name is looked for there only
    use = f"rill chat {name}, rill eval {name}, rill serve {name}"
    if config.workflow == "embodied":
        use = f"in another recipe policy_path={model}"
    if config.workflow == "reward_model":  # it scores answers and writes none
        use = f"in an RL recipe reward_model.model.path={model}"
    if not progress.has_reports:
        say(f"{'nothing done':<14} the run had taken its last step already: raise loop.steps to go on")
    if findings:  # each was told when it was found
        say(
            f"{'guards':<14} {len(findings)} finding{'' if len(findings) == 1 else 's'}, told above and in the report"
        )
    for line in curve_lines(history_of(read_metrics(run.path))):
        say(line)
    for when, sample in zip(("at first", "now"), then_and_now(run), strict=False):
        say(f"{when:<14} {sample.line()}")
    say()
    say(f"{'report':<14} {page.resolve().as_uri()}")
    say(f"{'dashboard':<14} rill dashboard{'' if run.path.parent == Path(RUNS_FOLDER) else f' {run.path}'}")
    say(f"{'model':<14} {model}: {use}")
    if not Path("recipes/mine.toml").exists():
        say(f"{'make it yours':<14} rill recipes copy {recipe} mine, edit recipes/mine.toml, rill train mine")
    activate = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("rill") is None and activate.exists():
        say(f"{'path':<14} rill is not on your PATH yet: source {activate}")


@contextmanager
def _warnings_to(progress: Progress) -> Iterator[None]:
    """An engine that died and came back is to be seen while it happens, not only in the log afterwards."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first, _, rest = record.getMessage().partition("\n")  # a worker's traceback belongs in the log
            progress.note(f"{record.levelname.lower()}: {first}{' … (see log.txt)' if rest else ''}")

    notes = Notes(logging.WARNING)
    notes.addFilter(lambda record: record.name != guards.__name__)  # the driver tells those itself
    logger = logging.getLogger("rill")
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)


@contextmanager
def _log_to(run: Run) -> Iterator[None]:
    """What rill says goes to the run's log, until the run ends: the folder may be gone after it."""
    logger = logging.getLogger("rill")
    handler = logging.FileHandler(run.log_path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
