"""The one loop: synchronous, one-step-off and fully asynchronous training differ in `max_lag` alone.

    begin ──▶ workflow.step(flow): calls that run at once ──▶ batch full ──▶ step applied, engines updated ──▶ report
      ▲          prompts ─▶ episodes ─▶ select ─▶ stages ─▶ train ─▶ publish                                     │
      └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

What unblocks what: stages wait for chunks of the batch (controller.py), the trainer for theirs; the new version makes
room for more prompts. With max_lag 0 the engines let go of their devices when the batch is full: that is all that
sharing needs, so a workflow file does not know of it. While it waits, the loop looks after engines and environments
(fleet.py); a lost trainer or controller ends the session (workflow.py). A checkpoint is taken between two steps; the
token log has the tokens of everything that is begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rill.journal.checkpoints import RunCheckpoints
from rill.telemetry import trace
from rill.types import PolicyVersion
from rill.workflows.fleet import TEND_S
from rill.workflows.flow import Flow


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

    def tell(self, observers: Sequence[Observer], save: Callable[[], None] = lambda: None) -> None:
        """`save`: what is done is kept where an observer wishes to stop here."""
        try:
            for observer in observers:
                observer(self)
        except KeyboardInterrupt:
            save()
            raise


Observer = Callable[[StepReport], None]


class Loop:
    def __init__(
        self,
        flow: Flow,
        step: Callable[[Flow], None],
        checkpoints: RunCheckpoints,
        observers: Sequence[Observer],
    ) -> None:
        recipe = flow.session.config
        self.config = recipe.loop
        self.flow = flow
        self.step = 0
        """Training steps that are done."""
        self._metrics: Mapping[str, float] = {}
        """Of the newest step."""
        self._write_step = step
        self._ask = flow.session.ask
        self._controller = flow.session.groups["controller"]
        self.checkpoints = checkpoints
        self.observers = list(observers)
        self._eval_every = recipe.eval.every if recipe.eval.all_sets(recipe.data) else None
        """Steps; 0: before the first and after the last; None: there is nothing to evaluate on."""
        self._stalled_s = 0.0
        """That checkpoints took since the last step began."""

    def restore(self) -> None:
        """Load the newest whole checkpoint, if there is one."""
        self.step = restored(self.checkpoints, self.config.steps, self.observers)

    def run(self) -> None:
        """From where it stands to the last step."""
        fleet = self.flow.fleet
        fleet.publish(self._version)
        if self.step == 0:
            self._report(self._evaluated())
        while self.step < self.config.steps:
            self._take_step()
        self.rest()
        self.save()

    def rest(self) -> None:
        """Between two steps: nothing is being sampled from now on, and the controller has put the last batch away."""
        fleet = self.flow.fleet
        if fleet.is_open:
            fleet.stop(self._ask(self._controller.finish()))
            fleet.end_epoch()
        self._ask(self._controller.trained(self.step))

    def save(self) -> None:
        """A checkpoint of where it stands. Engines that run ahead go on: what they have said is in the token log."""
        began_s = time.monotonic()
        self._ask(self._controller.trained(self.step))
        self.checkpoints.save(self.step, self._metrics.get(self.config.keep_best))
        self._stalled_s += time.monotonic() - began_s

    @property
    def _version(self) -> PolicyVersion:
        """Version 0 is what engines load by themselves; the trainer's first weights are version 1."""
        return PolicyVersion(self.step + 1)

    def _take_step(self) -> None:
        began_s = time.monotonic()
        self.checkpoints.settle_if_done()
        stalled_s, self._stalled_s = self._stalled_s + time.monotonic() - began_s, 0.0
        began_s = time.monotonic()
        with trace.span("step", lane="loop", step=self.step):
            self.flow.begin(self._version)
            self._write_step(self.flow)
            with trace.span("wait for rollouts", lane="loop"):
                batch = self.flow.batch()
            full_s = time.monotonic()
            with trace.span("train", lane="loop", samples=batch.num_samples, tokens=batch.num_tokens):
                trained = self.flow.end()
            self.step += 1
            step_s = time.monotonic() - began_s
        metrics = {
            **batch.metrics,
            **trained,
            "time/step_s": step_s,
            "time/rollout_wait_s": full_s - began_s,
            "time/checkpoint_s": stalled_s,
            "throughput/tokens_per_s": batch.num_tokens / step_s,
            "throughput/samples_per_s": batch.num_samples / step_s,
        }
        if total := batch.metrics.get("length/total"):
            share = batch.metrics["length/response"] / total
            metrics["throughput/sampled_tokens_per_s"] = share * metrics["throughput/tokens_per_s"]
        if self.step == self.config.steps or (self._eval_every and self.step % self._eval_every == 0):
            metrics |= self._evaluated()
        self._report(metrics, self.save)
        if self.config.checkpoint_every > 0 and self.step % self.config.checkpoint_every == 0:
            self.save()

    def _evaluated(self) -> dict[str, float]:
        """Metrics of every evaluation set; an epoch of its own where the engines are not generating anyway."""
        if self._eval_every is None:
            return {}
        fleet = self.flow.fleet
        is_own = not fleet.is_open
        with trace.span("evaluate", lane="loop", step=self.step):
            self._ask(self._controller.trained(self.step))
            if is_own:
                fleet.open_epoch()
            call = self._controller.evaluate()
            while not call.ended(TEND_S):
                fleet.tend()
            metrics: dict[str, float] = self._ask(call)
            if is_own:
                fleet.end_epoch()
            return metrics

    def _report(self, metrics: Mapping[str, float], save: Callable[[], None] = lambda: None) -> None:
        self._metrics = metrics
        StepReport(step=self.step, num_steps=self.config.steps, metrics=metrics).tell(self.observers, save)


def restored(checkpoints: RunCheckpoints, num_steps: int, observers: Sequence[Observer]) -> int:
    """Load the newest whole checkpoint; the step that it holds. Where a newer one is damaged observers are told from
    where the run goes on: they have figures of steps after it."""
    step = checkpoints.load_latest() or 0
    if checkpoints.has_passed_over:
        notes = (f"going on from step {step}",)
        StepReport(step=step, num_steps=num_steps, metrics={}, phase="restart", notes=notes).tell(observers)
    return step
