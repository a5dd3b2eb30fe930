"""The one loop: synchronous, one-step-off and fully asynchronous training differ in `max_lag` alone.

    begin ──▶ workflow.step(flow): calls that run at once ──▶ batch full ──▶ step applied, engines updated ──▶ report
      ▲          prompts ─▶ episodes ─▶ select ─▶ stages ─▶ train ─▶ publish                                     │
      └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

What unblocks what: stages wait for chunks of the batch (controller.py), the trainer for theirs; the new version makes
room for more prompts. With max_lag 0 the epoch of the tasks ends with the batch: the engines finish, let go of their
devices, and others may have them. That is all that sharing devices needs, so a workflow file does not know whether its
parts share. While it waits, the loop looks after engines and environments: one that is lost is brought back (fleet.py).
A lost trainer or controller ends the session, and the workflow begins the next from the last checkpoint and the token
log (workflow.py). A checkpoint is taken between two steps; the log has the tokens of everything that is begun.

The driver makes a fixed number of calls a step and sees neither samples nor single groups: what a step costs it grows
with neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rill.journal.checkpoints import RunCheckpoints
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry import trace
from rill.types import PolicyVersion
from rill.workflows.config import LoopConfig
from rill.workflows.controller import Controller
from rill.workflows.fleet import answer
from rill.workflows.flow import Flow

TEND_S = 1.0
"""How often engines are looked after while the driver waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What observers (the metric log, the progress view, guards) get after every step."""

    step: int
    num_steps: int
    metrics: Mapping[str, float]
    phase: str = "step"
    """"step" for RL, "warm-up" for the supervised steps before it."""
    notes: Sequence[str] = ()
    """What the person at the terminal should know and no metric says."""


Observer = Callable[[StepReport], None]


class Loop:
    def __init__(
        self,
        config: LoopConfig,
        flow: Flow,
        step: Callable[[Flow], None],
        controller: WorkerGroup[Controller],
        checkpoints: RunCheckpoints,
        observers: Sequence[Observer],
        *,
        eval_every: int | None = None,
    ) -> None:
        """`eval_every`: steps; 0: before the first and after the last; None: there is nothing to evaluate on."""
        self.config = config
        self.flow = flow
        self.step = 0
        """Training steps that are done."""
        self._metrics: Mapping[str, float] = {}
        """Of the newest step."""
        self._write_step = step
        self.controller = controller
        self.checkpoints = checkpoints
        self._observers = observers
        self._eval_every = eval_every

    def restore(self) -> None:
        """Load the newest whole checkpoint, if there is one."""
        self.step = self.checkpoints.load_latest() or 0

    def run(self) -> None:
        """From where it stands to the last step."""
        fleet = self.flow.fleet
        fleet.publish(self._version)
        if self.step == 0:
            self._report(self._evaluated())
        while self.step < self.config.steps:
            self._take_step()
        self.ask(self.controller.trained(self.step))
        if fleet.is_open:
            self.ask(self.controller.finish())
            fleet.end_epoch()
        self.checkpoints.save(self.step, self._metrics.get(self.config.keep_best))

    def save(self) -> None:
        """A checkpoint of where it stands. Engines that run ahead go on: what they have said is in the token log."""
        self.ask(self.controller.trained(self.step))
        self.checkpoints.save(self.step, self._metrics.get(self.config.keep_best))

    def ask(self, call: Handle) -> Any:
        """The controller's answer. It holds the deadline of a step itself, and its errors are the loop's own."""
        return answer(call, timeout_s=2 * self.config.step_timeout_s)

    @property
    def _version(self) -> PolicyVersion:
        """Version 0 is what engines load by themselves; the trainer's first weights are version 1."""
        return PolicyVersion(self.step + 1)

    def _take_step(self) -> None:
        self.checkpoints.settle_if_done()
        began = time.monotonic()
        with trace.span("step", lane="loop", step=self.step):
            self.flow.begin(self._version)
            self._write_step(self.flow)
            with trace.span("wait for rollouts", lane="loop"):
                batch = self.flow.batch(TEND_S)
            full_at = time.monotonic()
            with trace.span("train", lane="loop", samples=batch.num_samples, tokens=batch.num_tokens):
                trained = self.flow.end(TEND_S)
            synced_at = time.monotonic() - trained.sync_s
            synced = self.flow.fleet.take_in(trained.synced)
            self.step += 1
            ended = time.monotonic()
        if self.config.max_lag > 0:
            self.ask(self.controller.trained(self.step))
        metrics = {
            **batch.metrics,
            **trained.metrics,
            **synced,
            "time/step_s": ended - began,
            "time/rollout_wait_s": full_at - began,
            "time/train_s": synced_at - full_at,
            "time/sync_s": ended - synced_at,
            "throughput/tokens_per_s": batch.num_tokens / (ended - began),
            "throughput/samples_per_s": batch.num_samples / (ended - began),
        }
        if total := batch.metrics.get("length/total"):
            share = batch.metrics["length/response"] / total
            metrics["throughput/sampled_tokens_per_s"] = share * metrics["throughput/tokens_per_s"]
        if self.step == self.config.steps or (self._eval_every and self.step % self._eval_every == 0):
            metrics |= self._evaluated()
        try:
            self._report(metrics)
        except KeyboardInterrupt:  # an observer's wish to stop here: the step is whole, and is kept
            self.save()
            raise
        if self.config.checkpoint_every > 0 and self.step % self.config.checkpoint_every == 0:
            self.save()

    def _evaluated(self) -> dict[str, float]:
        """Metrics of every evaluation set; an epoch of its own where the engines are not generating anyway."""
        if self._eval_every is None:
            return {}
        fleet = self.flow.fleet
        is_own = not fleet.is_open
        with trace.span("evaluate", lane="loop", step=self.step):
            self.ask(self.controller.trained(self.step))
            if is_own:
                fleet.open_epoch()
            call = self.controller.evaluate()
            while not call.ended(TEND_S):
                fleet.tend()
            metrics: dict[str, float] = self.ask(call)
            if is_own:
                fleet.end_epoch()
            return metrics

    def _report(self, metrics: Mapping[str, float]) -> None:
        self._metrics = metrics
        report = StepReport(step=self.step, num_steps=self.config.steps, metrics=metrics)
        for observer in self._observers:
            observer(report)
