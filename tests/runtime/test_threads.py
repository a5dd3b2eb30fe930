"""What libraries are told of threads before they are loaded."""

from __future__ import annotations

import pytest

from rill.runtime.cluster import Cluster
from rill.runtime.process.threads import SPIN_COUNT, thread_env
from rill.runtime.worker import Worker
from tests.runtime import environment_witness


class Witness(Worker):
    def spin_count(self) -> str:
        return environment_witness.SPIN_COUNT_AT_IMPORT


def test_openmp_threads_sleep_soon_unless_the_user_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert thread_env(3, {})["OMP_NUM_THREADS"] == "3"
    assert thread_env(3, {})["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
    assert "GOMP_SPINCOUNT" not in thread_env(3, {"OMP_WAIT_POLICY": "ACTIVE"})
    assert thread_env(3, {"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in thread_env(3, {})


def test_what_the_user_sets_wins() -> None:
    assert thread_env(3, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"


def test_libraries_loaded_before_the_workers_are_forked_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with Cluster(devices=1, preload=[environment_witness.__name__]) as cluster:
        witness = Witness.launch(cluster, name="witness", placement="0")
        assert witness.spin_count().wait(timeout_s=20) == [str(SPIN_COUNT)]
