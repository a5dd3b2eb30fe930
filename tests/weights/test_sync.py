"""A failed or late engine is named, kept out of service until it has caught up, and the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from rill.errors import StaleWeightsError, WeightSyncError
from rill.types import Floats, PolicyVersion, TokenIds
from rill.weights.base import Publisher, Receiver, open_publisher, open_receiver
from rill.weights.buckets import NamedTensors
from rill.weights.canary import Canary, CanaryProof, Tolerance
from rill.weights.manifest import SealedManifest
from rill.weights.sync import Pulled, ThreadedTargets, WeightSync
from tests.weights.scene import same, transport, weights


class FakeEngine:
    """Copies weights and scores a token by what its weights say, so that stale weights show."""

    def __init__(self) -> None:
        self.version = PolicyVersion(-1)
        self.held: dict[str, torch.Tensor] = {}
        self.fail = False
        self.ignore = False
        self.gate = threading.Event()
        self.gate.set()

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        assert self.gate.wait(10)
        new = {name: tensor.clone() for name, tensor in tensors}
        if self.fail:
            raise RuntimeError("out of memory")
        if not self.ignore:
            self.held = new
        self.version = version

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 60.0
    ) -> list[Floats]:
        return scores(self.held, sequences)


class LocalTarget:
    """An engine in this process."""

    def __init__(self, name: str, engine: FakeEngine, receiver: Receiver) -> None:
        self.name = name
        self._engine = engine
        self._receiver = receiver

    def pull(self, manifest: SealedManifest) -> Pulled:
        engine = self._engine
        engine.update_weights(self._receiver.pull(manifest.open()), manifest.version)
        return Pulled.proven(self.name, manifest, engine.version, engine.score)


def scores(held: dict[str, torch.Tensor], sequences: Sequence[TokenIds]) -> list[Floats]:
    table = held["layers.3.weight"].numpy()
    return [np.where(np.arange(len(s)) > 0, table[s % len(table)], 0).astype(np.float32) for s in sequences]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = open_publisher(transport("shm"))
    yield publisher
    publisher.close()


def assemble(
    publisher: Publisher, count: int, timeout_s: float = 10.0
) -> tuple[WeightSync, list[FakeEngine]]:
    engines = [FakeEngine() for _ in range(count)]
    targets = [LocalTarget(f"engine{i}", e, open_receiver(transport("shm"))) for i, e in enumerate(engines)]
    canary = Canary.random(100, seed=1)
    return WeightSync(publisher, ThreadedTargets(targets), timeout_s=timeout_s, canary=canary), engines


def proof_of(held: dict[str, torch.Tensor]) -> CanaryProof:
    canary = Canary.random(100, seed=1)
    return CanaryProof(canary=canary, expected=scores(held, canary.sequences))


def step(sync: WeightSync, version: int):  # type: ignore[no-untyped-def]
    new = weights(version)
    return sync.sync(new.items(), PolicyVersion(version), lambda sequences: scores(new, sequences))


def test_all_engines_take_the_version_and_are_in_service(publisher: Publisher) -> None:
    sync, engines = assemble(publisher, 3)
    report = step(sync, 1)
    assert report.in_service == ("engine0", "engine1", "engine2") and not report.failed
    assert all(same(e.held, weights(1)) for e in engines)
    assert {state.version for state in sync.states().values()} == {1}
    assert report.canary == {"engine0": 0.0, "engine1": 0.0, "engine2": 0.0}


def test_a_failing_engine_is_named_and_comes_back_with_the_next_version(publisher: Publisher) -> None:
    sync, engines = assemble(publisher, 2)
    step(sync, 1)
    engines[1].fail = True
    report = step(sync, 2)
    assert report.in_service == ("engine0",) and "out of memory" in report.failed["engine1"]
    assert {name: state.version for name, state in sync.states().items()} == {"engine0": 2, "engine1": 1}
    engines[1].fail = False
    report = step(sync, 3)
    assert report.in_service == ("engine0", "engine1")


def test_a_late_engine_is_out_of_service_until_it_has_caught_up(publisher: Publisher) -> None:
    sync, engines = assemble(publisher, 2, timeout_s=3.0)
    engines[0].gate.clear()
    report = step(sync, 1)
    assert "within 3 s" in report.failed["engine0"] and report.in_service == ("engine1",)
    report = step(sync, 2)
    assert "still pulling" in report.failed["engine0"]
    engines[0].gate.set()
    assert "engine0" in sync._late["engine0"].ended(10.0)
    report = step(sync, 3)
    assert report.in_service == ("engine0", "engine1") and same(engines[0].held, weights(3))


def test_an_engine_that_says_it_updated_but_did_not_fails_the_canary(publisher: Publisher) -> None:
    sync, engines = assemble(publisher, 2)
    step(sync, 1)
    engines[0].ignore = True
    report = step(sync, 2)
    assert report.in_service == ("engine1",)
    assert "answers with other weights" in report.failed["engine0"] and "token id" in report.failed["engine0"]


def test_no_engine_left_is_an_error_that_names_every_reason(publisher: Publisher) -> None:
    sync, engines = assemble(publisher, 2)
    for engine in engines:
        engine.fail = True
    with pytest.raises(WeightSyncError, match=r"0 of 2 engines.*engine0.*engine1"):
        step(sync, 1)


def test_an_engine_that_joins_catches_up_with_the_others_by_itself(publisher: Publisher) -> None:
    targets = ThreadedTargets([LocalTarget("engine0", FakeEngine(), open_receiver(transport("shm")))])
    sync = WeightSync(publisher, targets, canary=Canary.random(100, seed=1))
    new = weights(1)
    sealed = publisher.publish(new.items(), PolicyVersion(1)).seal(proof_of(new))
    sync.distribute(sealed)
    late = FakeEngine()
    targets.add(LocalTarget("late", late, open_receiver(transport("shm"))))
    assert set(sync.states()) == {"engine0"}
    sync.catch_up("late", sealed)
    assert sync.states()["late"].in_service and same(late.held, new)
    assert step(sync, 2).in_service == ("engine0", "late")


def test_engines_that_join_and_leave_are_met_at_the_next_sync(publisher: Publisher) -> None:
    targets = ThreadedTargets([LocalTarget("engine0", FakeEngine(), open_receiver(transport("shm")))])
    sync = WeightSync(publisher, targets, canary=Canary.random(100, seed=1))
    step(sync, 1)
    targets.add(LocalTarget("late", FakeEngine(), open_receiver(transport("shm"))))
    assert step(sync, 2).in_service == ("engine0", "late")
    targets.remove("engine0")
    assert step(sync, 3).in_service == ("late",) and set(sync.states()) == {"late"}
    targets.add(LocalTarget("late", FakeEngine(), open_receiver(transport("shm"))))
    with pytest.raises(WeightSyncError, match="two engines have one name"):
        step(sync, 4)


def test_an_engine_that_catches_up_with_other_weights_is_refused(publisher: Publisher) -> None:
    targets = ThreadedTargets([])
    sync = WeightSync(publisher, targets, canary=Canary.random(100, seed=1))
    sealed = publisher.publish(weights(1).items(), PolicyVersion(1)).seal(proof_of(weights(2)))
    sync.distribute(sealed)
    targets.add(LocalTarget("late", FakeEngine(), open_receiver(transport("shm"))))
    with pytest.raises(WeightSyncError, match="late did not come to version 1.*answers with other weights"):
        sync.catch_up("late", sealed)


def test_the_canary_names_the_worst_token() -> None:
    canary = Canary([np.array([4, 5, 6], dtype=np.int32)], dtype="float32")
    ours, theirs = (
        [np.array([0, -1.0, -2.0], dtype=np.float32)],
        [np.array([0, -1.0, -2.5], dtype=np.float32)],
    )
    report = canary.compare("e", PolicyVersion(3), ours, theirs)
    assert not report.is_same and "position 2, token id 6" in report.worst
    with pytest.raises(StaleWeightsError, match="says version 3"):
        report.raise_if_stale()
    loose = Canary(canary.sequences, tolerance=Tolerance(mean=1.0, largest=1.0))
    loose.compare("e", PolicyVersion(3), ours, theirs).raise_if_stale()


def test_a_canary_score_that_is_not_finite_is_stale() -> None:
    canary = Canary([np.array([1, 2], dtype=np.int32)], dtype="bfloat16")
    nan = [np.array([0, np.nan], dtype=np.float32)]
    assert not canary.compare("e", PolicyVersion(1), nan, [np.zeros(2, dtype=np.float32)]).is_same
