"""Lanes: order inside one, no waiting between them, no thread left when there is nothing to do."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from rill.runtime.transfer import lanes as lanes_module
from rill.runtime.transfer.lanes import Lanes
from tests.runtime.leftovers import becomes_true

pytestmark = pytest.mark.timeout(30)


def test_a_lane_keeps_its_order_and_holds_up_no_other() -> None:
    lanes, gate, done = Lanes("test-lane"), threading.Event(), threading.Event()
    ran: list[int] = []

    def job(n: int) -> None:
        gate.wait(10)
        ran.append(n)

    for n in range(50):
        lanes.submit("slow", partial(job, n))
    lanes.submit("other", done.set)
    assert done.wait(5) and ran == []
    assert lanes.is_busy("slow")
    gate.set()
    assert becomes_true(lambda: len(ran) == 50) and ran == list(range(50))
    assert becomes_true(lambda: not lanes.is_busy("slow"))


def test_an_idle_lane_has_no_thread_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_LINGER_S", 0.02)
    lanes = Lanes("test-idle-lane")

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "test-idle-lane"]

    for _ in range(3):
        done = threading.Event()
        lanes.submit("x", done.set)
        assert done.wait(5)
        assert becomes_true(lambda: not threads())
