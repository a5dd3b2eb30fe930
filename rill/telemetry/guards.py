"""Is this run correct? Checks on a run's figures, on by default, that say in words what is wrong and what to try.

A guard looks at the figures of each step and, when they are off, gives a Finding: what was seen, since when, what it
usually means. Findings go to `guards.jsonl` in the run folder and to the run's log. What follows is the guard's action,
which a recipe may change (`guard_actions`):

    warn     the run goes on
    pause    no step is taken until the figure is well again, PAUSE_S at most: room on the disk or memory only
    stop     GuardError, after a checkpoint where the step is whole
    off      it is not looked at

A figure that a workflow does not report switches its guard off. A guard speaks once per episode: again only after the
figure has been well in between, for some steps where it needs more than one to speak. It speaks within two steps of
where the fault shows: a figure that no healthy run has is off by itself; one that is only wrong beside what it was must
lie far from the median of the steps before, and twice as far while there are few of them.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median

import psutil

from rill.errors import ConfigError, GuardError
from rill.registry import unknown_name_message
from rill.telemetry.jsonl import LineFile, encode_line, read_records

GUARDS_FILE = "guards.jsonl"
FAILING_REWARDS = "failing rewards"
_log = logging.getLogger(__name__)


PAUSE_S, PAUSE_POLL_S = 3600.0, 2.0
OF_THE_MACHINE = ("disk/checkpoints_left", "memory/available")
"""Figures that may become well while a run waits (`room_left`)."""
WELL_STEPS = 5
"""In a row, before a guard that needs more than one step speaks again: a figure at its bound is told once."""
MAX_MISMATCH = 10.0
"""Nats, of one token at lag 0."""
HISTORY = 20
"""Steps that a drift is measured against."""
FULL_HISTORY, MIN_HISTORY = 8, 3
"""With so many steps behind it a figure has a course; with so few only what is twice as far off has left it."""


class Action(StrEnum):
    OFF = "off"
    WARN = "warn"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    guard: str
    step: int
    action: Action
    seen: str
    """What the figure was and what it should have been."""
    meaning: str
    """What it usually means, and what to try."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.guard}: {self.seen}. {self.meaning}"


def read_findings(run_dir: Path) -> Iterator[Finding]:
    """What the guards of a run found, oldest first."""
    return read_records(run_dir / GUARDS_FILE, Finding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    name: str
    metric: str
    is_off: Callable[[float], bool] = lambda value: False
    """Whether a value is wrong."""
    drift: Callable[[float, float, float], float] | None = None
    """For a figure that is also, or only, wrong beside what it was: how far it has left its course, from 1 on too far.
    Of (value, median, median distance from it) of HISTORY steps."""
    expected: str
    meaning: str
    patience: int = 1
    """Steps in a row that must be off before it speaks."""
    action: Action = Action.WARN


def _times(value: float, usual: float) -> float:
    """The larger over the smaller."""
    smaller, larger = sorted((max(value, 1e-9), max(usual, 1e-9)))
    return larger / smaller


WATCHED = (
    Guard(
        name="effective samples",
        metric="mismatch/ess",
        is_off=lambda value: value < 0.5,
        expected="above 0.5 of the batch",
        meaning="A few tokens carry the whole correction. Lower loop.max_lag or the learning rate.",
        patience=2,
    ),
    Guard(
        name="entropy collapse",
        metric="policy/entropy",
        is_off=lambda value: value < 1e-3,
        drift=lambda value, usual, spread: _times(value, usual) / 20 if value < usual else 0.0,
        expected="above 0.001 nats, and not a twentieth of what it was",
        meaning="The policy answers the same every time and can learn nothing more: raise the temperature, add "
        "an entropy bonus, or widen the clip range upwards (DAPO).",
        patience=2,
    ),
    Guard(
        name="no signal",
        metric="reward/std",
        is_off=lambda value: value < 1e-6,
        expected="above 0",
        meaning="All answers to a prompt get the same reward, so no advantage is left: the task is too hard, "
        "too easy, or the reward does not see the answer. Look at the rollouts.",
        patience=2,
    ),
    Guard(
        name="reward jump",
        metric="reward/mean",
        drift=lambda value, usual, spread: abs(value - usual) / max(0.35, 10 * spread, abs(usual) / 4),
        expected="near what it was in the steps before",
        meaning="A reward that changes at once is seldom learning: the policy has found a hole in the reward, the "
        "reward or its data changed, or the last update broke the policy. Read the newest rollouts beside older ones.",
    ),
    Guard(
        name="length drift",
        metric="length/response",
        drift=lambda value, usual, spread: _times(value, usual) / 3,
        expected="within a factor of three of the steps before",
        meaning="Answers become very long or very short within a few steps: look for repetition in the rollouts, for a "
        "reward that pays for length, and at how the loss weighs long answers (algorithm.type, dr_grpo).",
    ),
    Guard(
        name="repetition",
        metric="length/repeated",
        is_off=lambda value: value > 0.2,
        expected="at most a fifth of the answers",
        meaning="Answers say the same again and again: the policy is collapsing. Lower the learning rate, raise the "
        "temperature, or end answers earlier.",
        patience=2,
    ),
    Guard(
        name="masked tokens",
        metric="correction/dropped",
        is_off=lambda value: value > 0.3,
        expected="at most 30 % of the tokens",
        meaning="A correction leaves most of what was sampled out of the loss: engine and trainer disagree (see "
        "mismatch/…), or samples are too old. Lower loop.max_lag, or loosen the correction's bounds.",
        patience=2,
    ),
    Guard(
        name="mismatch tail",
        metric="mismatch/outside",
        is_off=lambda value: value > 0.1,
        expected="at most 10 % of the tokens",
        meaning="Too many tokens are much likelier to one of engine and trainer than to the other: another precision "
        "or kernel, an attention mask that leaks, or experts that are routed otherwise (trainer.routing_replay).",
        patience=2,
    ),
    Guard(
        name="misplaced samples",
        metric="groups/misplaced",
        is_off=lambda value: value != 0.0,
        expected="0: a sample lies under the key of its group",
        meaning="Samples reached the trainer under another group's id, so they were compared with answers to other "
        "prompts. A stage or an environment changed ids or their order: keep Sample.trajectory.group_id as it is.",
        action=Action.STOP,
    ),
    Guard(
        name="disk",
        metric="disk/checkpoints_left",
        is_off=lambda value: value < 1.5,
        expected="room for at least 1.5 more checkpoints",
        meaning="The disk of the run folder is nearly full. The run waits until there is room: remove old runs or "
        "checkpoints, or move them.",
        action=Action.PAUSE,
    ),
    Guard(
        name="memory",
        metric="memory/available",
        is_off=lambda value: value < 0.03,
        expected="at least 3 % of the machine's memory",
        meaning="The machine is about to run out of memory, and the system then kills a process at will. Lower "
        "rollout.max_concurrent, trainer.micro_batch_tokens or rollout.env_workers.",
    ),
    Guard(
        name="truncated answers",
        metric="length/truncated",
        is_off=lambda value: value > 0.5,
        expected="at most half",
        meaning="Most answers end at max_new_tokens: raise it, or penalise over-long answers.",
        patience=2,
    ),
    Guard(
        name=FAILING_REWARDS,
        metric="rollout/errors",
        is_off=lambda value: value > 0.1,
        expected="at most 10 %",
        meaning="Environments or rewards fail; `error` in the rollouts says how.",
        patience=2,
    ),
    Guard(
        name="tools never called",
        metric="rollout/no_tool_call",
        is_off=lambda value: value >= 0.99,
        expected="some episodes with a call",
        meaning="Tools are offered and nobody calls one. Either the model writes calls in another format than the one "
        "that its chat template teaches, or the task does not need them: look at the rollouts.",
        patience=2,
    ),
    Guard(
        name="empty answers",
        metric="length/response",
        is_off=lambda value: value <= 1.0,
        expected="above 1 token",
        meaning="Answers end with their first token: look at the chat template, at what counts as an end-of-text "
        "token, and at `stop`.",
        patience=2,
    ),
    Guard(
        name="clipped updates",
        metric="policy/clipped",
        is_off=lambda value: value > 0.3,
        expected="at most 30 % of the tokens",
        meaning="Too many tokens have left the trust region within one batch: lower the learning rate, the number of "
        "epochs or mini-batches, or loop.max_lag.",
        patience=2,
    ),
    Guard(
        name="large updates",
        metric="policy/kl",
        is_off=lambda value: value > 0.5,
        expected="at most 0.5 nats a token",
        meaning="The policy becomes another within one batch, faster than clipping can hold it: lower the learning "
        "rate by a factor of ten, and start again from an earlier checkpoint.",
        patience=2,
    ),
    Guard(
        name="no update",
        metric="grad_norm",
        is_off=lambda value: value == 0.0,
        expected="above 0",
        meaning="Nothing is learned: all advantages are 0 (see `reward/std`), every token is masked, or no "
        "parameter is trained.",
        patience=2,
    ),
    Guard(
        name="gradient",
        metric="grad_norm",
        is_off=lambda value: not math.isfinite(value),
        expected="finite",
        meaning="The update was not applied (trainer.on_nonfinite). Look for rewards without a bound and for "
        "log-probabilities that are not finite; lower the learning rate.",
    ),
    Guard(
        name="no finite gradient",
        metric="grad_norm",
        is_off=lambda value: not math.isfinite(value),
        expected="finite",
        meaning="No update was applied any more, so nothing can be learned: start again from an earlier checkpoint, "
        "with a lower learning rate or bounded rewards.",
        patience=5,
        action=Action.STOP,
    ),
)
"""Guards whose bounds hold for every run."""


def default_guards(*, max_lag: int, mismatch_limit: float) -> list[Guard]:
    """`mismatch_limit`: largest mean |log π_old − log μ| at lag 0, in nats; it depends on the engine's precision."""
    mean_limit, max_limit = mismatch_limit * (1 + 10 * max_lag), MAX_MISMATCH * (1 + max_lag)
    return [
        Guard(
            name="lag",
            metric="lag/max",
            is_off=lambda value: value > max_lag,
            expected=f"at most {max_lag} (loop.max_lag)",
            meaning="Samples are staler than allowed; with order = 'completion' a slow group can be. Use order = "
            "'admission', or a correction that masks stale tokens.",
        ),
        Guard(
            name="mismatch",
            metric="mismatch/abs_mean",
            is_off=lambda value: value > mean_limit,
            expected=f"at most {mean_limit:.3g} nats",
            meaning="Engine and trainer disagree about the same tokens: stale weights, another temperature or "
            "precision, a mask that leaks, another template. The canary after each sync tells which side moved.",
            patience=2,
        ),
        Guard(
            name="mismatch kl",
            metric="mismatch/kl_k3",
            is_off=lambda value: value > mean_limit,
            expected=f"at most {mean_limit:.3g} nats a token",
            meaning="The engine's policy is not the trainer's. Where the mean (see mismatch/abs_mean) is small, a few "
            "tokens make it: look for them in the rollouts, shaded by mismatch.",
            patience=2,
        ),
        Guard(
            name="mismatch max",
            metric="mismatch/abs_max",
            is_off=lambda value: value > max_limit,
            expected=f"at most {max_limit:g} nats for any token",
            meaning="The engine sampled a token that the trainer holds to be all but impossible: it saw another "
            "context, or an environment changed tokens or log-probabilities.",
            patience=2,
        ),
        *WATCHED,
    ]


def with_actions(guards: Sequence[Guard], actions: Mapping[str, str]) -> list[Guard]:
    """The guards with the actions that a recipe gives them. ConfigError: there is none of that name, or it cannot
    pause, because its figure does not change while no step is taken."""
    metrics = {guard.name: guard.metric for guard in guards}
    for name, action in actions.items():
        if name not in metrics:
            raise ConfigError(f"guard_actions: {unknown_name_message('guard', name, metrics)}")
        if action == Action.PAUSE and metrics[name] not in OF_THE_MACHINE:
            raise ConfigError(
                f"guard_actions: {name!r} cannot pause, for {metrics[name]} stays as it is while no step is taken: "
                "write off, warn or stop"
            )
    changed = [replace(guard, action=Action(actions.get(guard.name, guard.action))) for guard in guards]
    return [guard for guard in changed if guard.action is not Action.OFF]


def room_left(run_dir: Path, checkpoint_bytes: int) -> dict[str, float]:
    """Figures of the machine that guards look at."""
    memory = psutil.virtual_memory()
    free_bytes = shutil.disk_usage(run_dir).free
    figures = (free_bytes / max(checkpoint_bytes, 64 << 20), memory.available / memory.total)
    return dict(zip(OF_THE_MACHINE, figures, strict=True))


class GuardWatch:
    """Runs guards over the steps of a run. One per run, in the driver."""

    def __init__(
        self, run_dir: Path, guards: Sequence[Guard], tell: Callable[[Finding], None] = lambda finding: None
    ) -> None:
        """`tell` gets each finding when it is found, before a run waits for one; not the error that ends a run."""
        self._tell = tell
        self._guards = list(guards)
        self._history: dict[str, deque[float]] = {}
        self._off_for = {guard.name: 0 for guard in guards}
        self._well_for = {guard.name: 0 for guard in guards}
        self._file = LineFile(run_dir / GUARDS_FILE)
        self.findings: list[Finding] = []

    def check(
        self,
        step: int,
        metrics: Mapping[str, float],
        look_again: Callable[[], Mapping[str, float]] | None = None,
    ) -> list[Finding]:
        """The findings of this step. Raises GuardError after writing them if one of them stops the run; waits, looking
        again now and then, while one of them pauses it."""
        found = [
            (guard, finding)
            for guard in self._guards
            if (finding := self._check(guard, step, metrics)) is not None
        ]
        for _, finding in found:
            self._file.write(encode_line(asdict(finding)))
            _log.warning("%s", finding)
        findings = [finding for _, finding in found]
        self.findings += findings
        for finding in findings:
            if finding.action is Action.STOP:
                raise GuardError(str(finding))
            self._tell(finding)
        for guard, finding in found:
            if finding.action is Action.PAUSE and look_again is not None:
                self._pause(guard, finding, look_again)
        return findings

    def _pause(self, guard: Guard, finding: Finding, look_again: Callable[[], Mapping[str, float]]) -> None:
        deadline_s = time.monotonic() + PAUSE_S
        while guard.is_off(look_again()[guard.metric]):
            if time.monotonic() > deadline_s:
                raise GuardError(f"{finding} Nothing changed within {PAUSE_S:.0f} s")
            time.sleep(PAUSE_POLL_S)
        self._off_for[guard.name] = 0
        _log.warning("guard %s: %s is well again, the run goes on", guard.name, guard.metric)

    def close(self) -> None:
        self._file.close()

    def _check(self, guard: Guard, step: int, metrics: Mapping[str, float]) -> Finding | None:
        value = metrics.get(guard.metric)
        if value is None:
            return None
        if not self._is_off(guard, value):
            self._well_for[guard.name] += 1
            has_spoken = self._off_for[guard.name] >= guard.patience
            if not has_spoken or guard.patience == 1 or self._well_for[guard.name] >= WELL_STEPS:
                self._off_for[guard.name] = 0
            return None
        self._well_for[guard.name] = 0
        self._off_for[guard.name] += 1
        if self._off_for[guard.name] != guard.patience:
            return None
        return Finding(
            guard=guard.name,
            step=step,
            action=guard.action,
            seen=f"{guard.metric} is {value:.4g}, expected {guard.expected}",
            meaning=guard.meaning,
        )

    def _is_off(self, guard: Guard, value: float) -> bool:
        if guard.drift is None:
            return guard.is_off(value)
        past = self._history.setdefault(guard.name, deque(maxlen=HISTORY))
        has_left = False
        if len(past) >= MIN_HISTORY:
            usual = median(past)
            spread = median(abs(each - usual) for each in past)
            has_left = guard.drift(value, usual, spread) > (1 if len(past) >= FULL_HISTORY else 2)
        past.append(value)
        return has_left or guard.is_off(value)
