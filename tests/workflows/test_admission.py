"""Admission against the capacity formula, and what a trace of a run must look like under it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rill.workflows.admission import Admission


def test_lag_zero_admits_one_batch_and_no_more_until_it_is_trained() -> None:
    admission = Admission(batch_groups=4, max_lag=0, max_concurrent=100)
    assert admission.capacity == 4
    admission.admit(4)
    assert admission.capacity == 0
    for _ in range(4):
        admission.finish(kept=True)
    assert admission.capacity == 0, "an accepted batch is not yet trained on"
    admission.trained()
    assert admission.capacity == 4


def test_a_dropped_group_frees_its_place() -> None:
    admission = Admission(batch_groups=2, max_lag=0, max_concurrent=100)
    admission.admit(2)
    admission.finish(kept=False)
    assert (admission.capacity, admission.dropped) == (1, 1)


def test_concurrency_bounds_admission_before_lag_does() -> None:
    assert Admission(batch_groups=8, max_lag=3, max_concurrent=5).capacity == 5


def test_admitting_more_than_the_capacity_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Admission(batch_groups=1, max_lag=0, max_concurrent=1).admit(2)


@given(
    batch=st.integers(1, 6), lag=st.integers(0, 4), concurrent=st.integers(1, 20), seed=st.integers(0, 999)
)
def test_consumed_in_order_of_admission_no_group_is_older_than_the_allowed_lag(
    batch: int, lag: int, concurrent: int, seed: int
) -> None:
    rng = random.Random(seed)
    admission = Admission(batch_groups=batch, max_lag=lag, max_concurrent=concurrent)
    born: list[int] = []  # version at admission of each group, in order
    running: list[int] = []
    finished: set[int] = set()
    for _ in range(300):
        while admission.capacity and rng.random() < 0.8:
            admission.admit(1)
            running.append(len(born))
            born.append(admission.version)
        if running and rng.random() < 0.7:
            finished.add(running.pop(rng.randrange(len(running))))
            admission.finish(kept=True)
        first = admission.version * batch
        if all(i in finished for i in range(first, first + batch)):
            assert all(admission.version - born[i] <= lag for i in range(first, first + batch))
            admission.trained()


def test_a_resumed_run_counts_what_was_finished_and_admits_again_what_ran() -> None:
    admission = Admission(batch_groups=3, max_lag=1, max_concurrent=100)
    admission.admit(6)
    for _ in range(5):
        admission.finish(kept=True)
    admission.trained()
    resumed = Admission(batch_groups=3, max_lag=1, max_concurrent=100)
    resumed.load_state(admission.state())
    assert (resumed.version, resumed.accepted, resumed.running, resumed.capacity) == (1, 5, 0, 4)
