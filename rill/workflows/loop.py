"""The one loop: synchronous, one-step-off and fully asynchronous training differ in `max_lag` alone.

                        ┌──── once a step ────┐
    feeder ── StepPlan ─▶ train ──▶ trained ──┴▶ feeder: more capacity
      │ ▲                 ▲   │
    jobs outcomes         │   │ new weights
      ▼ │         samples,│   │                                all the time, without the driver
    rollout.generate ─────┘   ▼
    rollout.update ◀── actor: publish

What unblocks what: `take_batch` waits for enough kept groups; `train` takes exactly those samples, by key; the new
version raises the feeder's capacity. With max_lag 0 the epoch of the jobs channel ends with the batch: the engines
finish, let go of their devices, and the trainer may have them. That is all that sharing devices needs, so a workflow
file does not know whether its parts share. While it waits, the loop looks after the engines: one that is lost is
brought back by the fleet (fleet.py). A lost trainer or feeder ends the run, which can be resumed: a checkpoint is taken
between two steps and holds the samples that wait for training, and what is begun (with its tokens, on request).

The driver makes a fixed number of calls a step and sees neither samples nor single groups: what a step costs it grows
with neither. A workflow gives the loop its parts and one function that runs a training step; see reasoning.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry import trace
from rill.types import PolicyVersion
from rill.workflows.checkpoints import RunCheckpoints
from rill.workflows.evaluation import Evaluator
from rill.workflows.feeder import Collected, Feeder
from rill.workflows.fleet import Fleet, Flow, answer
from rill.workflows.jobs import StepPlan, TrainedStep
from rill.workflows.sections import LoopConfig

TEND_S = 1.0
"""How often the engines are looked after while a batch comes together."""

TrainStep = Callable[[StepPlan], TrainedStep]
"""Runs one training step to its end, the engines brought to what it made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What observers (the metric log, the progress view, guards) get after every step."""

    step: int
    num_steps: int
    metrics: Mapping[str, float]
    phase: str = "step"
    """"step" for RL, "warm-up" for the supervised steps before it."""
    notes: Sequence[str] = ()
    """What the person at the terminal should know and no figure says."""


Observer = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a workflow hands to the loop."""

    fleet: Fleet
    """The engines, and how weights reach them."""
    feeder: WorkerGroup[Feeder]
    """One rank."""
    flow: Flow
    train_step: TrainStep
    evaluator: Evaluator
    checkpoints: RunCheckpoints


class Loop:
    def __init__(self, config: LoopConfig, parts: Parts, observers: Sequence[Observer]) -> None:
        self.config = config
        self.parts = parts
        self.step = 0
        """Training steps that are done."""
        self._observers = observers

    def restore(self) -> bool:
        """Load the newest whole checkpoint; False when there is none."""
        self.step = self.parts.checkpoints.load_latest()
        return self.step > 0

    def run(self) -> None:
        """From where it stands to the last step."""
        fleet, flow = self.parts.fleet, self.parts.flow
        self._ask(self.parts.feeder.start(flow.jobs, flow.rollouts, flow.outcomes))
        fleet.publish(self._version)
        if self.step == 0:
            self._report({}, evaluate=True)
        while self.step < self.config.steps:
            self._take_step()
        self._ask(self.parts.feeder.trained(self.step))
        if fleet.is_open:
            self._ask(self.parts.feeder.finish())
            fleet.end_epoch()
        self.parts.checkpoints.save(self.step)

    @property
    def _version(self) -> PolicyVersion:
        """Version 0 is what engines load by themselves; the trainer's first weights are version 1."""
        return PolicyVersion(self.step + 1)

    def _take_step(self) -> None:
        began = time.monotonic()
        with trace.span("step", lane="loop", step=self.step):
            with trace.span("wait for rollouts", lane="loop"):
                collected = self._collect()
            plan = collected.plan
            trained_at = time.monotonic()
            with trace.span("train", lane="loop", samples=plan.num_samples, tokens=plan.num_tokens):
                trained = self.parts.train_step(plan)
            synced_at = time.monotonic() - trained.sync_s
            synced = self.parts.fleet.take_in(trained.synced)
            self.step += 1
            ended = time.monotonic()
        if self.config.max_lag > 0:
            self._ask(self.parts.feeder.trained(self.step))
        times = {
            "time/step_s": ended - began,
            "time/rollout_wait_s": trained_at - began,
            "time/train_s": synced_at - trained_at,
            "time/sync_s": ended - synced_at,
            "throughput/tokens_per_s": plan.num_tokens / (ended - began),
            "throughput/samples_per_s": plan.num_samples / (ended - began),
        }
        try:
            self._report({**collected.figures, **trained.figures, **synced, **times}, evaluate=False)
        except KeyboardInterrupt:  # an observer's wish to stop here: the step is whole, and is kept
            self._save()
            raise
        if self.config.checkpoint_every > 0 and self.step % self.config.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        """With keep_unfinished, engines that run ahead are stopped meanwhile, so that the checkpoint holds every token
        they have said; the next step lets them go on behind those."""
        if self.parts.fleet.is_open and self.config.keep_unfinished:
            self._ask(self.parts.feeder.finish())
            self.parts.fleet.put_back()
            self.parts.fleet.end_epoch()
        self._ask(self.parts.feeder.trained(self.step))
        self.parts.checkpoints.save(self.step)

    def _collect(self) -> Collected:
        """Wait for a batch, and for the engines to let go of their devices if this step is an epoch: one call of
        generate() lasts an epoch, a step when synchronous, otherwise the whole run."""
        config, fleet = self.config, self.parts.fleet
        if not fleet.is_open:
            fleet.open_epoch()
        batch = self.parts.feeder.take_batch(self.step)
        while not batch.ended(TEND_S):
            fleet.tend()
        collected: Collected = self._ask(batch)
        if config.max_lag == 0:
            if config.overprovision:
                fleet.put_back()
            fleet.end_epoch()
        return collected

    def _ask(self, call: Handle) -> Any:
        """The feeder's answer. It holds the deadline of a step itself, and its errors are the loop's own."""
        return answer(call, timeout_s=2 * self.config.step_timeout_s)

    def _report(self, metrics: Mapping[str, float], *, evaluate: bool) -> None:
        if evaluate or self.parts.evaluator.is_due(self.step, self.config.steps):
            with trace.span("evaluate", lane="loop", step=self.step):
                metrics = {**metrics, **self.parts.evaluator.run()}
        report = StepReport(step=self.step, num_steps=self.config.steps, metrics=metrics)
        for observer in self._observers:
            observer(report)
