"""What several threads get from one handle."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rill.errors import PeerDiedError, StuckError
from rill.runtime.address import WorkerAddress
from rill.runtime.handle import Handle, Outcome

TARGETS = [WorkerAddress("w", rank, "n", 1, "") for rank in range(2)]


def test_every_thread_that_waits_gets_the_results_and_they_are_decoded_once() -> None:
    handle = Handle("w.m", TARGETS)
    num_decoded = 0

    def slowly() -> str:
        nonlocal num_decoded
        num_decoded += 1
        time.sleep(0.05)
        return "value"

    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(handle.wait(10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    handle.fill(0, Outcome(False, 1.0, {}, slowly))
    handle.fill(1, Outcome(False, 2.0, {}, lambda: "other"))
    for thread in threads:
        thread.join(10)
    assert got == [["value", "other"]] * 4
    assert num_decoded == 1


def test_a_result_that_cannot_be_decoded_fails_every_wait_alike() -> None:
    handle = Handle("w.m", TARGETS[:1])

    def fail() -> None:
        raise ImportError("no module named elsewhere")

    handle.fill(0, Outcome(False, 1.0, {}, fail))
    for _ in range(2):
        with pytest.raises(ImportError, match="elsewhere"):
            handle.wait(1)


def test_the_first_outcome_of_a_rank_counts() -> None:
    handle = Handle("w.m", TARGETS[:1])
    handle.fill(0, Outcome(False, 1.0, {}, lambda: 7))
    handle.lose(0, "is late news")
    assert handle.wait(1) == [7]


def test_what_is_known_so_far_can_be_asked_at_any_time() -> None:
    handle = Handle("w.m", TARGETS)
    handle.lose(0, "is gone")
    assert not handle.done() and not handle.ended(0.01)
    assert [outcome is None for outcome in handle.so_far()] == [False, True]
    with pytest.raises(StuckError, match=r"has not ended on w\[1\] within 0 s"):
        handle.outcomes(0)
    with pytest.raises(PeerDiedError, match="gone"):
        handle.wait(0)
    handle.fill(1, Outcome(False, 1.0, {}, lambda: 1))
    assert handle.done() and handle.ended(0) and handle.outcomes(0)[1].value == 1
