"""The door by which tokens leave: one call a step, before any caller has seen them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from rill.errors import RequestError
from rill.inference.base import Delta
from rill.inference.native.core import News, Outlet
from rill.inference.native.engine import NativeEngine
from rill.types import StopReason
from tests.inference.native_models import make_engine, prompts, request


class Recorder(Outlet):
    """What a write-ahead log would be: takes note of every new token, then hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, list[int]] = {}
        self.ended: list[str] = []

    def deliver(self, news: Iterable[News]) -> None:
        news = list(news)
        for seq, reason in news:
            known = self.tokens.setdefault(seq.id, [])
            known += seq.tokens[seq.num_prompt + len(known) :]
            if reason is not None:
                self.ended.append(seq.id)
        super().deliver(news)


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    engine = make_engine()
    yield engine
    engine.close()


def test_an_outlet_sees_every_token_before_its_caller(engine: NativeEngine) -> None:
    recorder = engine._core.outlet = Recorder()
    seen: dict[str, list[int]] = {}

    def on_delta(delta: Delta) -> None:
        mine = seen.setdefault(delta.request_id, [])
        mine += delta.token_ids.tolist()
        assert recorder.tokens[delta.request_id] == mine

    inputs = prompts((5, 16, 33))
    futures = engine.submit([request(i, p) for i, p in enumerate(inputs[:2])], on_delta)
    futures += engine.submit([request(2, inputs[2])])
    done = [future.result(timeout=60) for future in futures]
    for completion in done:
        assert recorder.tokens[completion.request_id] == completion.token_ids.tolist()
    assert sorted(recorder.ended) == sorted(c.request_id for c in done)
    assert seen == {c.request_id: c.token_ids.tolist() for c in done[:2]}


def test_an_id_is_in_use_until_its_end_was_delivered(engine: NativeEngine) -> None:
    [prompt] = prompts((5,))
    engine.generate([request(0, prompt)], timeout_s=60)
    engine.generate([request(0, prompt)], timeout_s=60)
    outlet = Outlet()
    outlet.take_ids(["a"])
    for given in (["a"], ["b", "b"]):
        with pytest.raises(RequestError, match="same id"):
            outlet.take_ids(given)
    outlet.take_ids(["b"])


def test_a_stream_learns_that_its_engine_closed() -> None:
    engine = make_engine()
    reasons: list[StopReason | None] = []
    has_begun = threading.Event()

    def on_delta(delta: Delta) -> None:
        reasons.append(delta.stop_reason)
        has_begun.set()
        time.sleep(0.01)  # 200 tokens take longer than the way to close()

    [prompt] = prompts((5,))
    [future] = engine.submit([request(0, prompt, max_new_tokens=200)], on_delta)
    assert has_begun.wait(timeout=60)
    engine.close()
    assert reasons[-1] is StopReason.ABORTED
    assert future.result(timeout=1).stop_reason is StopReason.ABORTED


def test_between_its_first_and_its_last_tokens_a_stream_may_be_told_more_rarely(engine: NativeEngine) -> None:
    [prompt] = prompts((5,))
    patient = replace(request("patient", prompt, max_new_tokens=30), delta_interval_s=60.0)
    deltas: list[Delta] = []
    [future] = engine.submit([patient], deltas.append)
    done = future.result(timeout=60)
    assert [len(delta.token_ids) for delta in deltas] == [1, 29]
    assert [t for delta in deltas for t in delta.token_ids.tolist()] == done.token_ids.tolist()
    assert deltas[-1].stop_reason is StopReason.LENGTH
