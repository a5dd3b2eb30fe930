"""The surroundings that a worker's process is given."""

from __future__ import annotations

import pytest

from rill.runtime.host import SPIN_COUNT, thread_env


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
