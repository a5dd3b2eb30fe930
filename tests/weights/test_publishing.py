"""The engines of a run, as the publishing rank sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rill.errors import TrainingError
from rill.runtime.address import WorkerAddress
from rill.runtime.handle import Handle, Outcome
from rill.types import PolicyVersion
from rill.weights.manifest import SealedManifest
from rill.weights.publishing import Engines, PublishingWorker
from rill.weights.sync import Pulled


class Fleet:
    """As much of a group of engines as a sync needs: ranks that come and go, and take what they are given at once."""

    name = "rollout"

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks
        self.asked: list[tuple[int, ...]] = []

    def on(self, *ranks: int) -> Any:
        assert set(ranks) <= set(self.ranks)
        self.asked.append(ranks)
        return self

    def update(self, manifest: SealedManifest, interrupt: bool) -> Handle:
        ranks = self.asked[-1]
        handle = Handle("rollout.update", [WorkerAddress("rollout", rank, "n", 1, "") for rank in ranks])
        for index in range(len(ranks)):
            handle.fill(index, Outcome(False, 0.0, {}, lambda: Pulled(manifest.version, None, "")))
        return handle


def manifest(version: int) -> SealedManifest:
    return SealedManifest(PolicyVersion(version), 0, False, b"", b"")


def test_engines_that_join_and_leave_are_followed_by_their_ids() -> None:
    fleet = Fleet(0, 1)
    sync = Engines(None, fleet, timeout_s=1.0, interrupt=False)._sync  # type: ignore[arg-type]
    assert sync.distribute(manifest(1)).in_service == ("rollout[0]", "rollout[1]")
    fleet.ranks = (1, 4)
    assert sync.distribute(manifest(2)).in_service == ("rollout[1]", "rollout[4]")
    sync.catch_up("rollout[4]", manifest(2))
    assert fleet.asked == [(0, 1), (1, 4), (4,)]
    assert set(sync.states()) == {"rollout[1]", "rollout[4]"}


class HalfWay(PublishingWorker):
    """Fails in the middle of its steps."""

    publisher = None

    def _gather(self, version: PolicyVersion) -> SealedManifest | None:
        raise AssertionError("nothing is gathered")

    def _train(self, source: Any, version: PolicyVersion) -> Mapping[str, float]:
        raise ValueError("loss")


def test_a_step_that_failed_half_way_is_not_published_though_the_call_for_it_was_posted_behind() -> None:
    worker = HalfWay()
    with pytest.raises(ValueError, match="loss"):
        worker.train(None, PolicyVersion(1))
    with pytest.raises(TrainingError, match="the step to version 2 failed"):
        worker.publish(PolicyVersion(2))
