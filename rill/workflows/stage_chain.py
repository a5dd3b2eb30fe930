"""Stages that every sample passes between the engines and the trainer, one behind the other.

    rollouts ──▶ stage ──▶ channel ──▶ stage ──▶ channel ──▶ whoever trains

A stage is a call on a worker group that takes its share of a plan by key from one channel and puts it, under the same
keys, into the next. All calls of a step are made at once; each waits only for the samples it is about to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rill.runtime.channel import Channel
from rill.runtime.handle import Handle
from rill.workflows.jobs import StepPlan

Stage = Callable[[Channel, Channel, StepPlan], Handle]


class StageChain:
    def __init__(self, source: Channel, stages: Sequence[tuple[Stage, Channel]]) -> None:
        """`stages` in order, each with the channel behind it."""
        self._source = source
        self._stages = stages

    def begin(self, plan: StepPlan) -> tuple[Channel, list[Handle]]:
        """Start every stage on the plan; where the samples come out, and the calls."""
        source, calls = self._source, []
        for stage, target in self._stages:
            calls.append(stage(source, target, plan))
            source = target
        return source, calls
