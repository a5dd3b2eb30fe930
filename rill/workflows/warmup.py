"""Supervised steps before the first RL step, run by the actor, reported like any other step."""

from __future__ import annotations

from collections.abc import Sequence

from rill.config import PartConfig
from rill.runtime.group import WorkerGroup
from rill.workflows.actor import ActorWorker
from rill.workflows.loop import Observer, StepReport
from rill.workflows.sections import WarmupConfig

NUM_REPORTS = 20


def warm_up(
    actor: WorkerGroup[ActorWorker],
    data: PartConfig,
    config: WarmupConfig,
    seed: int,
    observers: Sequence[Observer],
    timeout_s: float,
) -> None:
    """Nothing when the recipe has no warm-up."""
    if config.steps == 0:
        return
    chunk = max(1, config.steps // NUM_REPORTS)
    for done in range(0, config.steps, chunk):
        num_steps = min(chunk, config.steps - done)
        figures = actor.warm_up(data, config, num_steps, seed).wait(timeout_s=timeout_s)[0]
        report = StepReport(step=done + num_steps, num_steps=config.steps, metrics=figures, phase="warm-up")
        for observer in observers:
            observer(report)
    actor.end_warm_up().wait(timeout_s=timeout_s)
