"""What the driver does while the calls of a step run."""

from __future__ import annotations

from typing import Any

from rill.types import PolicyVersion
from rill.weights.publishing import Synced
from rill.workflows.config import FlowConfig, LoopConfig
from rill.workflows.flow import Flow


class Call:
    """A handle whose call takes so many looks."""

    def __init__(self, result: Any, looks: int = 0) -> None:
        self._result = result
        self._looks = looks

    def ended(self, timeout_s: float) -> bool:
        self._looks -= 1
        return self._looks < 0

    def wait(self, timeout_s: float) -> list[Any]:
        return [self._result]


class Fleet:
    def __init__(self, told: list[str], *, is_open: bool) -> None:
        self.told = told
        self.is_open = is_open

    def tend(self) -> None:
        self.told.append("tended")


class Trainer:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def publish(self, version: PolicyVersion) -> Call:
        self.told.append(f"published {version}")
        return Call(Synced({}, {}))


def told_by(*, is_open: bool, looks: int) -> list[str]:
    told: list[str] = []
    nothing: Any = None
    fleet: Any = Fleet(told, is_open=is_open)
    flow = Flow(FlowConfig(), LoopConfig(), nothing, fleet, nothing, nothing, nothing)
    flow.begin(PolicyVersion(1))
    flow._trainer, flow._update = Trainer(told), Call({"loss": 1.0}, looks)  # type: ignore[assignment]
    assert flow.end(0.0).metrics == {"loss": 1.0}
    return told


def test_engines_that_run_ahead_are_looked_after_while_the_trainer_trains_and_before_it_publishes() -> None:
    assert told_by(is_open=True, looks=3) == ["tended"] * 3 + ["published 2"]


def test_engines_that_rest_need_nobody() -> None:
    assert told_by(is_open=False, looks=3) == ["published 2"]
