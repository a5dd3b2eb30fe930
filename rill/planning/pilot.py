"""A pilot decides, between two steps of a run, where its groups go and in what chunks samples move; the run's steering
(rill.workflows.steering) does it. Two pilots: the profiler, which measures, and the replanner, which follows a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rill.runtime.hub.history import CallRecord
from rill.telemetry.run import Run


class Report(Protocol):
    """Of a step that is done."""

    @property
    def step(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class Steering(Protocol):
    @property
    def run(self) -> Run: ...

    def history(self, since_s: float = 0.0) -> list[CallRecord]: ...

    def record(self) -> None: ...

    def resize(self, num_prompts: int) -> None: ...

    def switch(
        self,
        placement: Mapping[str, str],
        flow: Any,
        staying: bool | tuple[str, ...],
        *,
        keeps_state: bool = True,
    ) -> float: ...


class Pilot(Protocol):
    def after_step(self, steering: Steering, report: Report) -> None:
        """Called between two steps, and once before the first."""
