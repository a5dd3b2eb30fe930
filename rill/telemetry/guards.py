"""Is this run correct? Checks on a run's figures, on by default, that say in words what is wrong and what to try.

A guard looks at the figures of each step and, when they are off, gives a Finding: what was seen, since when, what it
usually means. Findings go to `guards.jsonl` in the run folder and to the run's log; a guard whose action is `stop`
raises GuardError. A figure that a workflow does not report switches its guard off. A guard speaks once per episode:
again only after the figure has been well in between.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from rill.errors import GuardError
from rill.telemetry.jsonl import LineFile, encode_line

GUARDS_FILE = "guards.jsonl"
FAILING_REWARDS = "failing rewards"
_log = logging.getLogger(__name__)


class Action(StrEnum):
    WARN = "warn"
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


FINDING_FIELDS = tuple(field.name for field in fields(Finding))
"""What a line of guards.jsonl holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    name: str
    metric: str
    is_off: Callable[[float], bool]
    """Whether a value is wrong."""
    expected: str
    meaning: str
    patience: int = 1
    """Steps in a row that must be off before it speaks."""
    action: Action = Action.WARN


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
        expected="above 0.001 nats",
        meaning="The policy answers the same every time and can learn nothing more: raise the temperature, add "
        "an entropy bonus, or widen the clip range upwards (DAPO).",
        patience=5,
    ),
    Guard(
        name="no signal",
        metric="reward/std",
        is_off=lambda value: value < 1e-6,
        expected="above 0",
        meaning="All answers to a prompt get the same reward, so no advantage is left: the task is too hard, "
        "too easy, or the reward does not see the answer. Look at the rollouts.",
        patience=3,
    ),
    Guard(
        name="truncated answers",
        metric="length/truncated",
        is_off=lambda value: value > 0.5,
        expected="at most half",
        meaning="Most answers end at max_new_tokens: raise it, or penalise over-long answers.",
        patience=3,
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
        name="no reward",
        metric="rollout/errors",
        is_off=lambda value: value >= 1.0,
        expected="at most 10 %",
        meaning="Every single reward failed, so nothing can be learned: fix the reward and start again.",
        patience=3,
        action=Action.STOP,
    ),
    Guard(
        name="tools never called",
        metric="rollout/no_tool_call",
        is_off=lambda value: value >= 0.99,
        expected="some episodes with a call",
        meaning="Tools are offered and nobody calls one. Either the model writes calls in another format than the one "
        "that its chat template teaches, or the task does not need them: look at the rollouts.",
        patience=3,
    ),
    Guard(
        name="empty answers",
        metric="length/response",
        is_off=lambda value: value <= 1.0,
        expected="above 1 token",
        meaning="Answers end with their first token: look at the chat template, at what counts as an end-of-text "
        "token, and at `stop`.",
        patience=3,
    ),
    Guard(
        name="clipped updates",
        metric="policy/clipped",
        is_off=lambda value: value > 0.5,
        expected="at most half of the tokens",
        meaning="Most tokens have left the trust region within one batch: lower the learning rate, the number of "
        "epochs or mini-batches, or loop.max_lag.",
        patience=2,
    ),
    Guard(
        name="no update",
        metric="grad_norm",
        is_off=lambda value: value == 0.0,
        expected="above 0",
        meaning="Nothing is learned: all advantages are 0 (see `reward/std`), every token is masked, or no "
        "parameter is trained.",
        patience=3,
    ),
    Guard(
        name="gradient",
        metric="grad_norm",
        is_off=lambda value: not math.isfinite(value),
        expected="finite",
        meaning="The update was not applied. Look for rewards or log-probabilities that are not finite.",
        action=Action.STOP,
    ),
)
"""Guards whose bounds hold for every run."""


def default_guards(*, max_lag: int, mismatch_limit: float) -> list[Guard]:
    """`mismatch_limit`: largest mean |log π_old − log μ| at lag 0, in nats; it depends on the engine's precision."""
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
            is_off=lambda value: value > mismatch_limit * (1 + 10 * max_lag),
            expected=f"at most {mismatch_limit * (1 + 10 * max_lag):.3g} nats",
            meaning="Engine and trainer disagree about the same tokens: stale weights, another temperature or "
            "precision, or a template that differs. The canary after each sync tells which side moved.",
            patience=2,
        ),
        *WATCHED,
    ]


class GuardWatch:
    """Runs guards over the steps of a run. One per run, in the driver."""

    def __init__(self, run_dir: Path, guards: Sequence[Guard]) -> None:
        self._guards = list(guards)
        self._off_for = {guard.name: 0 for guard in guards}
        self._file = LineFile(run_dir / GUARDS_FILE)
        self.findings: list[Finding] = []

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """The findings of this step. Raises GuardError after writing them if one of them stops the run."""
        found = [
            finding for guard in self._guards if (finding := self._check(guard, step, metrics)) is not None
        ]
        for finding in found:
            self._file.write(encode_line(asdict(finding)))
            _log.warning("%s", finding)
        self.findings += found
        for finding in found:
            if finding.action is Action.STOP:
                raise GuardError(str(finding))
        return found

    def close(self) -> None:
        self._file.close()

    def _check(self, guard: Guard, step: int, metrics: Mapping[str, float]) -> Finding | None:
        value = metrics.get(guard.metric)
        if value is None:
            return None
        if not guard.is_off(value):
            self._off_for[guard.name] = 0
            return None
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
