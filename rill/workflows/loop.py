"""The one loop: synchronous, one-step-off and fully asynchronous training differ in `max_lag` alone.

    ┌─▶ admit ─▶ jobs ─▶ rollout.generate ─▶ outcomes ─▶ collect ─┐         feeder thread: all the time
    │                          │                                  ▼
    │                          └── rollouts ──▶ train ◀── StepPlan          this thread: once a step
    │                                             │
    └── version + 1 ◀── engines update ◀── publish ◀┘

What unblocks what: `take_batch` waits for enough kept groups; `train` takes exactly those samples, by key; the new
version raises the feeder's capacity. With max_lag 0 the epoch of the jobs channel ends with the batch: the engines
finish, let go of their devices, and the trainer may have them. That is all that sharing devices needs, so a workflow
file does not know whether its parts share. While it waits, the loop looks after the engines: one that is lost is
brought back by the fleet (fleet.py). A lost trainer ends the run, which can be resumed.

A workflow gives the loop its parts and one function that runs a training step; see reasoning.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rill.data.loader import PromptSource
from rill.errors import StuckError
from rill.telemetry import trace
from rill.types import PolicyVersion
from rill.workflows.admission import Admission
from rill.workflows.checkpoints import RunCheckpoints
from rill.workflows.curriculum import CurriculumSource
from rill.workflows.evaluation import Evaluator
from rill.workflows.feeder import Collected, Feeder
from rill.workflows.fleet import Fleet, Flow
from rill.workflows.jobs import StepPlan
from rill.workflows.sections import LoopConfig

TEND_S = 1.0
"""How often the engines are looked after while a batch comes together."""

TrainStep = Callable[[StepPlan], Mapping[str, float]]
"""Runs one training step to its end and returns its figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What observers (the metric log, the progress view, guards) get after every step."""

    step: int
    num_steps: int
    metrics: Mapping[str, float]
    phase: str = "step"
    """"step" for RL, "warm-up" for the supervised steps before it."""


Observer = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a workflow hands to the loop."""

    fleet: Fleet
    """The engines, and how weights reach them."""
    flow: Flow
    source: PromptSource
    group_size: int
    train_step: TrainStep
    evaluator: Evaluator
    checkpoints: RunCheckpoints
    curriculum: CurriculumSource | None = None
    """The source itself, where it wants to hear what became of its prompts."""


class Loop:
    def __init__(self, config: LoopConfig, parts: Parts, observers: Sequence[Observer]) -> None:
        self.config = config
        self.parts = parts
        self.admission = Admission(
            batch_groups=config.groups_per_step,
            max_lag=config.max_lag,
            max_concurrent=config.max_concurrent_groups or (config.max_lag + 1) * config.groups_per_step,
            num_steps=config.steps,
        )
        self.feeder = Feeder(
            self.admission,
            source=parts.source,
            group_size=parts.group_size,
            jobs=parts.flow.jobs,
            outcomes=parts.flow.outcomes,
            in_admission_order=config.order == "admission",
            discard=lambda outcome: parts.flow.rollouts.take(keys=outcome.keys) if outcome.lengths else None,
            on_outcome=parts.curriculum.learn if parts.curriculum is not None else None,
        )
        self._observers = observers

    def restore(self) -> bool:
        """Load the newest whole checkpoint; False when there is none."""
        state = self.parts.checkpoints.load_latest()
        if state is None:
            return False
        self.feeder.load_state(state)
        return True

    def run(self) -> None:
        """From where it stands to the last step."""
        fleet, feeder = self.parts.fleet, self.feeder
        fleet.publish(self._version)
        if self.admission.version == 0:
            self._report({}, evaluate=True)
        feeder.start()
        try:
            while self.admission.version < self.config.steps:
                self._step()
        finally:
            feeder.stop()
        if fleet.is_generating:
            feeder.close_epoch()
            fleet.end_epoch()
        self._save()

    @property
    def _version(self) -> PolicyVersion:
        """Version 0 is what engines load by themselves; the trainer's first weights are version 1."""
        return PolicyVersion(self.admission.version + 1)

    def _step(self) -> None:
        began = time.monotonic()
        config, step = self.config, self.admission.version
        with trace.span("step", lane="loop", step=step):
            self._keep_generating()
            with trace.span("wait for rollouts", lane="loop"):
                collected = self._collect()
            plan = StepPlan(step=step, version=self._version, outcomes=collected.outcomes)
            trained_at = time.monotonic()
            with trace.span("train", lane="loop", samples=plan.num_samples, tokens=plan.num_tokens):
                figures = self.parts.train_step(plan)
            synced_at = time.monotonic()
            with trace.span("sync", lane="loop"):
                figures = {**figures, **self.parts.fleet.publish(PolicyVersion(plan.version + 1))}
            self.feeder.trained()  # after the engines have the weights: what is admitted now is made with them
            ended = time.monotonic()
        times = {
            "time/step_s": ended - began,
            "time/rollout_wait_s": trained_at - began,
            "time/train_s": synced_at - trained_at,
            "time/sync_s": ended - synced_at,
            "throughput/tokens_per_s": plan.num_tokens / (ended - began),
            "throughput/samples_per_s": plan.num_samples / (ended - began),
        }
        if self.parts.curriculum is not None:
            figures = {**figures, **self.parts.curriculum.metrics()}
        self._report({**summarise(collected, plan.version), **figures, **times}, evaluate=False)
        if config.checkpoint_every and self.admission.version % config.checkpoint_every == 0:
            self._save()

    def _keep_generating(self) -> None:
        """One call of generate() lasts an epoch: a step when synchronous, otherwise the whole run."""
        if self.config.max_lag == 0 or not self.parts.fleet.is_generating:
            self.feeder.open_epoch()
            self.parts.fleet.open_epoch()

    def _collect(self) -> Collected:
        """Wait for a batch, and for the engines to let go of their devices if this step is an epoch."""
        deadline_s = time.monotonic() + self.config.step_timeout_s
        while True:
            self.parts.fleet.tend()
            try:
                collected = self.feeder.take_batch(timeout_s=min(TEND_S, deadline_s - time.monotonic()))
                break
            except StuckError:
                if time.monotonic() >= deadline_s:
                    raise
        if self.config.max_lag == 0:
            self.feeder.close_epoch()
            self.parts.fleet.end_epoch()
        return collected

    def _report(self, metrics: Mapping[str, float], *, evaluate: bool) -> None:
        step = self.admission.version
        if evaluate or self.parts.evaluator.is_due(step, self.config.steps):
            with trace.span("evaluate", lane="loop", step=step):
                metrics = {**metrics, **self.parts.evaluator.run()}
        report = StepReport(step=step, num_steps=self.config.steps, metrics=metrics)
        for observer in self._observers:
            observer(report)

    def _save(self) -> None:
        self.parts.checkpoints.save(
            step=self.admission.version,
            state=self.feeder.state(),
        )


def summarise(collected: Collected, version: PolicyVersion) -> dict[str, float]:
    """Figures of a batch trained from `version`; each group counts by its number of samples."""
    outcomes = collected.outcomes
    weight = sum(len(outcome.lengths) for outcome in outcomes)
    figures: dict[str, float] = {}
    for name in sorted({name for outcome in outcomes for name in outcome.metrics}):
        figures[name] = sum(o.metrics.get(name, 0.0) * len(o.lengths) for o in outcomes) / weight
    lags = [int(version) - int(outcome.oldest_version) for outcome in outcomes]
    figures["lag/mean"] = sum(lags) / len(lags)
    figures["lag/max"] = float(max(lags))
    figures["groups/kept"] = float(len(outcomes))
    figures["groups/dropped"] = float(len(collected.dropped))
    for reason, count in collected.drop_reasons.items():
        figures[f"groups/dropped_{reason}"] = float(count)
    return figures
