"""What is wrong with a run, in words: read from its folder, whether it runs, has ended or was copied from elsewhere.

Called by `rill doctor RUN`. Every line says what is wrong, since when, and what to try; the worst come first. An empty
list is a run of which nothing bad is known.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from statistics import median
from typing import NamedTuple

from rill.journal.checkpoints import damaged_checkpoints, newest_size, step_of, whole_checkpoints
from rill.journal.reader import LogReader
from rill.telemetry.guards import Action, Finding, read_findings
from rill.telemetry.metrics import MetricRow, read_metrics
from rill.telemetry.rollouts import newest_failure
from rill.telemetry.run import VANISHED, Run, RunStatus

SILENCE_S, FACTOR = 120.0, 5.0
"""A run that runs is silent for too long after so many seconds, and so many times its longest step."""
_LOST = re.compile(r"WARNING \S+: (.+?) (?:is lost|died during|\(pid \d+\) ended)")
_NAME = re.compile(r"\w[\w.-]*\[\d+\]|hub")
KILLED = (
    "killed from outside: by a person, a scheduler, or the kernel because memory ran out (`dmesg` says so)"
)


class Severity(IntEnum):
    NOTE = 0
    WARNING = 1
    BROKEN = 2


class Diagnosis(NamedTuple):
    severity: Severity
    what: str
    since: str
    advice: str


def diagnose(run: Run) -> list[Diagnosis]:
    """The worst first."""
    rows = read_metrics(run.path)
    found = [
        *_status(run, rows),
        *_silence(run, rows),
        *_guards(run),
        *_losses(run),
        *_failures(run, rows),
        *_checkpoints(run, rows),
        *_token_log(run),
        *_disk(run),
    ]
    return sorted(found, key=lambda diagnosis: -diagnosis.severity)


def _status(run: Run, rows: list[MetricRow]) -> Iterator[Diagnosis]:
    state = run.state()
    last = f"step {rows[-1].step}, {_at(rows[-1].time_s)}" if rows else _at(state.changed_s)
    if state.status is RunStatus.FAILED:
        what = (
            f"it failed: {state.message.splitlines()[0] if state.message else 'no reason was written down'}"
        )
        advice = f"mend what the message names (all of it: {run.log_path}), then {run.resume_command}"
        if "SIGKILL" in what:
            advice = f"it was {KILLED}; raise loop.max_relaunches where that happens often. Then {run.resume_command}"
        yield Diagnosis(Severity.BROKEN, what, last, advice)
    elif state.status is RunStatus.INTERRUPTED:
        cause = f"it may have been {KILLED}, or the machine went down; " if state.message == VANISHED else ""
        advice = f"{cause}nothing that was sampled is lost: {run.resume_command}"
        what = f"it is not running: {state.message}"
        yield Diagnosis(Severity.WARNING, what, last, advice)
    elif state.status is RunStatus.UNKNOWN:
        advice = f"{run.resume_command} writes it anew"
        yield Diagnosis(Severity.WARNING, state.message, _at(state.changed_s), advice)


def _silence(run: Run, rows: list[MetricRow]) -> Iterator[Diagnosis]:
    state = run.state()
    if state.status is not RunStatus.RUNNING:
        return
    last_s = rows[-1].time_s if rows else state.changed_s
    usual_s = median([b.time_s - a.time_s for a, b in zip(rows[-21:], rows[-20:])]) if len(rows) > 1 else 0.0
    silent_s = time.time() - last_s
    if silent_s < max(SILENCE_S, FACTOR * usual_s):
        return
    reports = sorted((run.path / "logs").glob("stuck-*.md"))
    advice = (
        f"{reports[-1]} says who waits for whom"
        if reports
        else f"look at {run.log_path} and at `rill runs trace`"
    )
    what = f"it runs and is silent: no step for {silent_s:.0f} s, a step usually takes {usual_s:.1f} s"
    yield Diagnosis(Severity.BROKEN, what, _at(last_s), advice)


def _guards(run: Run) -> Iterator[Diagnosis]:
    """One line for each guard that spoke: since its first finding, with its newest."""
    found: dict[str, list[Finding]] = {}
    for finding in read_findings(run.path):
        found.setdefault(finding.guard, []).append(finding)
    for name, findings in found.items():
        newest, times = findings[-1], f", {len(findings)} times" if len(findings) > 1 else ""
        severity = Severity.BROKEN if newest.action is Action.STOP else Severity.WARNING
        yield Diagnosis(
            severity, f"guard {name}: {newest.seen}", f"step {findings[0].step}{times}", newest.meaning
        )


def _losses(run: Run) -> Iterator[Diagnosis]:
    """Processes that were lost, from the run's log."""
    lost: Counter[str] = Counter()
    since = ""
    try:
        with run.log_path.open(encoding="utf-8", errors="replace") as log:
            for line in log:
                if found := _LOST.search(line):
                    lost.update(_NAME.findall(found[1]))
                    since = since or line[:19]
    except OSError:
        return
    if lost:
        told = ", ".join(f"{name} {count} time{'s' * (count > 1)}" for name, count in lost.items())
        severity = Severity.NOTE if lost.total() == 1 else Severity.WARNING
        advice = f"{run.path / 'logs'} has the last words of each; `dmesg` says whether the kernel killed it"
        yield Diagnosis(severity, f"processes were lost and started again: {told}", since, advice)


def _failures(run: Run, rows: list[MetricRow]) -> Iterator[Diagnosis]:
    failing = [row for row in rows if row.values.get("rollout/errors", 0.0) > 0.1]
    if failing and (error := newest_failure(run)):
        share = failing[-1].values["rollout/errors"]
        yield Diagnosis(
            Severity.WARNING,
            f"{share:.0%} of the episodes fail, for example: {error.splitlines()[0]}",
            f"step {failing[0].step}",
            "they are left out of training; `rill runs rollouts RUN --failed` shows them",
        )


def _checkpoints(run: Run, rows: list[MetricRow]) -> Iterator[Diagnosis]:
    whole = whole_checkpoints(run)
    for folder in damaged_checkpoints(run):
        what = f"the checkpoint of step {step_of(folder)} is damaged and was passed over"
        advice = "`rill runs verify RUN` checks all of them; look at the disk (SMART, dmesg)"
        yield Diagnosis(Severity.WARNING, what, "", advice)
    step = rows[-1].step if rows else 0
    done = max(0, step_of(whole[-1])) if whole else 0
    if run.state().status is not RunStatus.FINISHED and step - done >= 50:
        what = f"{step - done} steps would be taken again after a failure: the newest checkpoint is of step {done}"
        advice = "their tokens are in the token log, their gradients are not: set loop.checkpoint_every"
        yield Diagnosis(Severity.NOTE, what, f"step {done}", advice)


def _token_log(run: Run) -> Iterator[Diagnosis]:
    reader = LogReader(run.path)
    reader.read_all()
    for damage in reader.damages():
        advice = "what was lost there is sampled again; look at the disk (SMART, dmesg)"
        yield Diagnosis(Severity.WARNING, f"token log {damage}", "", advice)
    begun = [sequence for _, sequence in reader.sequences() if not sequence.is_finished]
    if begun and run.state().status is not RunStatus.RUNNING:
        num_tokens = sum(len(sequence.token_ids) for sequence in begun)
        what = f"{len(begun)} answers were under way, with {num_tokens} tokens in the token log"
        advice = f"they go on behind those tokens: {run.resume_command}"
        yield Diagnosis(Severity.NOTE, what, "", advice)


def _disk(run: Run) -> Iterator[Diagnosis]:
    free_bytes, size = shutil.disk_usage(run.path).free, newest_size(run)
    if free_bytes < 1.5 * max(size, 64 << 20):
        what = f"{free_bytes / 1e6:,.0f} MB are free on the disk of {run.path}, a checkpoint takes {size / 1e6:,.0f} MB"
        advice = "make room, or lower loop.keep_checkpoints: the run pauses when the next one does not fit"
        yield Diagnosis(Severity.BROKEN, what, "now", advice)


def _at(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
