from __future__ import annotations

import time

import pytest

from rill.cli import stall
from rill.cli.stall import SILENCE_S, START_S, StallWatch
from rill.workflows.loop import StepReport


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def watch(clock: Clock, said: list[str]) -> StallWatch:
    return StallWatch(said.append, lambda message: f"{message}; rollout[0] waits", clock)


def step(watch: StallWatch, clock: Clock, seconds: float) -> None:
    clock.now_s += seconds
    watch.check()
    watch.observe(StepReport(step=1, num_steps=9, metrics={}))


def test_a_step_that_takes_its_usual_time_is_not_remarked_upon(
    watch: StallWatch, clock: Clock, said: list[str]
) -> None:
    for _ in range(3):
        step(watch, clock, SILENCE_S / 2)
    clock.now_s += SILENCE_S
    watch.check()
    assert said == []


def test_silence_is_noted_with_who_waits_and_again_when_it_has_doubled(
    watch: StallWatch, clock: Clock, said: list[str]
) -> None:
    step(watch, clock, 50.0)
    step(watch, clock, 4.0)
    for _ in range(100):
        clock.now_s += SILENCE_S / 20
        watch.check()
    assert [line.partition(";")[0] for line in said] == [
        "no step has ended for 2 min 0 s",
        "no step has ended for 4 min 0 s",
        "no step has ended for 8 min 0 s",
    ]
    assert said[0].endswith("the longest so far took 4 s; rollout[0] waits")


def test_a_start_may_take_longer_than_a_step(watch: StallWatch, clock: Clock, said: list[str]) -> None:
    clock.now_s += START_S - 1
    watch.check()
    assert said == []
    clock.now_s += 1
    watch.check()
    assert said == ["no first step for 10 min 0 s; rollout[0] waits"]


def test_the_watch_speaks_by_itself_and_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(stall, "TICK_S", 0.01)
    monkeypatch.setattr(stall, "START_S", 0.0)
    watch = StallWatch(said.append)
    with watch:
        while not said:
            time.sleep(0.005)
    assert "no cluster is running yet" in said[0]

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stall, "current", lambda: None)
    monkeypatch.setattr(stall, "explain", full)
    assert "No space left" in stall.who_waits("no step has ended")
    assert not watch._thread.is_alive()
