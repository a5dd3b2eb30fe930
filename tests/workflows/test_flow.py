"""What the driver does while the calls of a step run."""

from __future__ import annotations

from typing import Any

from rill.types import PolicyVersion
from rill.workflows.config import OnlineConfig
from rill.workflows.flow import Flow
from rill.workflows.session import Session


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
        recipe = {
            "workflow": "any",
            "data": {"type": "arithmetic"},
            "rollout": {},
            "algorithm": {},
            "trainer": {},
        }
        config = OnlineConfig.model_validate({**recipe, "loop": {"max_lag": int(is_open)}})
        nothing: Any = None
        self.session = Session(config, *[nothing] * 6)

    def tend(self) -> None:
        self.told.append("tended")

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        self.told.append(f"published {version}")
        return {"time/sync_s": 0.0}


def told_by(*, is_open: bool, looks: int) -> list[str]:
    told: list[str] = []
    fleet: Any = Fleet(told, is_open=is_open)
    flow = Flow(fleet)
    flow.begin(PolicyVersion(1))
    trained: Any = {"loss": 1.0}
    flow._calls = [Call(trained, looks)]  # type: ignore[list-item]
    assert flow.end()["loss"] == 1.0
    return told


def test_engines_that_run_ahead_are_looked_after_while_the_trainer_trains_and_before_it_publishes() -> None:
    assert told_by(is_open=True, looks=3) == ["tended"] * 3 + ["published 2"]


def test_engines_that_rest_need_nobody() -> None:
    assert told_by(is_open=False, looks=3) == ["published 2"]
