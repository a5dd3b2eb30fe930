"""Between the engine's thread and the event loop: who hears of what, in which order, and what gets in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from rill.inference.base import Completion, Delta
from rill.inference.server.generation import Hub, News


class Recorder:
    """A stream of one request that notes when it heard what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.request_ids = [name]
        self.has_token = False
        self._log = log

    def deliver(self, news: Sequence[News]) -> None:
        kinds = ["tokens" if isinstance(item, Delta) else "end" for item in news]
        self._log.append(f"{self.request_ids[0]} {'+'.join(kinds)}")


def delta(name: str) -> Delta:
    one = np.ones(1, np.int32)
    return Delta(request_id=name, token_ids=one, logprobs=one.astype(np.float32), versions=one)


async def heard(act: Callable[[Hub, list[str]], None], *, interval_s: float = 0.0) -> list[str]:
    """What happened, one entry per turn of the loop among them, after `act` has pushed all it wants."""
    log: list[str] = []
    hub = Hub(asyncio.get_running_loop(), interval_s)
    act(hub, log)
    for _ in range(12):
        log.append("turn")
        await asyncio.sleep(0)
    return log


@pytest.mark.asyncio
async def test_requests_that_end_together_are_answered_a_few_in_each_turn_of_the_loop() -> None:
    def act(hub: Hub, log: list[str]) -> None:
        for number in range(8):
            hub.push_end(Recorder(f"r{number}", log), Future[Completion]())

    log = await heard(act)
    ends = [entry for entry in log if entry != "turn"]
    assert ends == [f"r{number} end" for number in range(8)]
    runs = "".join("t" if entry == "turn" else "e" for entry in log)
    assert "eee" not in runs, "the loop could not look at its sockets between more than two answers"


@pytest.mark.asyncio
async def test_an_end_comes_before_the_tokens_of_others() -> None:
    def act(hub: Hub, log: list[str]) -> None:
        for name in ("a", "b", "c"):
            stream = Recorder(name, log)
            stream.has_token = True
            hub.streams[name] = stream
            hub.push(delta(name))
        hub.push_end(Recorder("whole", log), Future[Completion]())

    log = await heard(act, interval_s=60.0)
    assert [entry for entry in log if entry != "turn"] == ["whole end", "a tokens", "b tokens", "c tokens"]


@pytest.mark.asyncio
async def test_tokens_of_a_stream_that_are_pending_together_arrive_together() -> None:
    def act(hub: Hub, log: list[str]) -> None:
        stream = Recorder("a", log)
        hub.streams["a"] = stream
        for _ in range(3):
            hub.push(delta("a"))
        hub.push_end(stream, Future[Completion]())
        del hub.streams["a"]
        hub.push(delta("a"))  # nobody reads it any more

    log = await heard(act, interval_s=60.0)
    assert [entry for entry in log if entry != "turn"] == ["a tokens+tokens+tokens+end"]


@pytest.mark.asyncio
async def test_the_end_of_one_sample_does_not_overtake_tokens_of_another_of_the_same_stream() -> None:
    log: list[str] = []
    hub = Hub(asyncio.get_running_loop(), 0.0)
    for name in [*(f"other{number}" for number in range(8)), "a"]:
        hub.streams[name] = Recorder(name, log)
        hub.push(delta(name))
    await asyncio.sleep(0)  # the others are told first, a few in each turn
    hub.push(delta("a"))
    hub.push_end(hub.streams["a"], Future[Completion]())
    for _ in range(12):
        await asyncio.sleep(0)
    assert "".join(entry[2:] for entry in log if entry.startswith("a ")) == "tokens+tokens+end"


@pytest.mark.asyncio
async def test_many_streams_share_the_loop_by_waiting_longer() -> None:
    hub = Hub(asyncio.get_running_loop(), 0.04)
    assert hub.interval_s == 0.04
    for number in range(256):
        hub.streams[f"s{number}"] = Recorder(f"s{number}", [])
    assert hub.interval_s == pytest.approx(0.512)
