"""What the driver does while the calls of a step run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rill.errors import PeerDiedError, RillError
from rill.types import PolicyVersion
from rill.workflows.config import OnlineConfig
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

    def so_far(self) -> list[Any]:
        error = self._result if isinstance(self._result, RillError) else None
        return [SimpleNamespace(error=error)]


class Fleet:
    def __init__(self, told: list[str], *, is_open: bool, posted: Call) -> None:
        self.told = told
        self.posted = posted
        self.is_open = is_open
        recipe = {
            "workflow": "any",
            "data": {"type": "arithmetic"},
            "rollout": {},
            "algorithm": {},
            "trainer": {},
        }
        config = OnlineConfig.model_validate({**recipe, "loop": {"max_lag": int(is_open)}})
        self.session = SimpleNamespace(config=config, groups={"actor": SimpleNamespace(publish=self.post)})

    def tend(self) -> None:
        self.told.append("tended")

    def post(self, version: PolicyVersion) -> Call:
        self.told.append(f"posted {version}")
        return self.posted

    def publish(self, version: PolicyVersion, posted: Call | None) -> dict[str, float]:
        assert posted in (None, self.posted)
        self.told.append(f"published {version}")
        return {"time/sync_s": 0.0}


def flow_of(told: list[str], trained: Call, posted: Call, *, is_open: bool) -> Flow:
    fleet: Any = Fleet(told, is_open=is_open, posted=posted)
    flow = Flow(fleet)
    flow.begin(PolicyVersion(1))
    flow._calls = [trained]  # type: ignore[list-item]
    return flow


def told_by(*, is_open: bool, looks: int) -> list[str]:
    told: list[str] = []
    flow = flow_of(told, Call({"loss": 1.0}, looks), Call(None, looks), is_open=is_open)
    assert flow.end()["loss"] == 1.0
    return told


def test_engines_that_run_ahead_are_looked_after_while_the_trainer_trains_and_before_it_publishes() -> None:
    assert told_by(is_open=True, looks=3) == ["tended"] * 3 + ["published 2"]


def test_engines_that_rest_need_nobody_and_are_published_to_right_behind_the_training() -> None:
    assert told_by(is_open=False, looks=3) == ["posted 2", "published 2"]


def test_what_ended_the_training_is_raised_though_publishing_behind_it_never_ends() -> None:
    told: list[str] = []
    flow = flow_of(told, Call(PeerDiedError("actor[1] died")), Call(None, looks=10**9), is_open=False)
    with pytest.raises(PeerDiedError, match="died"):
        flow.end()
    assert told == ["posted 2"]


@pytest.mark.parametrize(
    ("devices", "waiting"),
    [
        ({"rollout": {0}, "reference": {1}, "actor": {2}}, set()),
        ({"rollout": {0}, "reference": {0}, "actor": {0}}, {"reference.score", "actor.train"}),
        ({"rollout": {0, 1}, "reference": {0}, "actor": {1}}, {"reference.score"}),
        ({"rollout": {0}, "reference": {1}, "actor": {0}}, {"actor.train"}),
        ({"rollout": {0}, "reference": {1}, "actor": {1}}, {"actor.train"}),
    ],
    ids=["apart", "shared", "engines first, then side by side", "around the reference", "engines apart"],
)
def test_a_group_waits_for_its_whole_batch_only_where_one_it_shares_with_may_still_work(
    devices: dict[str, set[int]], waiting: set[str]
) -> None:
    flow = Flow.__new__(Flow)
    flow._lines = {}
    flow.session = SimpleNamespace(take_turns=lambda one, other: bool(devices[one] & devices[other]))  # type: ignore[assignment]
    upstream: tuple[str, ...] = ("rollout",)
    for line in ("reference.score", "actor.train"):
        is_whole = flow._waits_for_all(line.partition(".")[0], upstream)
        flow._lines[line] = SimpleNamespace(is_whole=is_whole)  # type: ignore[assignment]
        upstream = (*upstream, line)
    assert {name for name, line in flow._lines.items() if line.is_whole} == waiting
