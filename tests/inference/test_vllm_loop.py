"""The thread that drives vLLM, around an engine that has vLLM's methods: one token for every request in each step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rill.errors import EngineError
from rill.inference.base import Completion, PauseMode, Request
from rill.inference.flight import Flight
from rill.inference.vllm_loop import Job, VllmLoop
from rill.types import PolicyVersion, SamplingParams, StopReason


class LLMEngine:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.fails = False

    def add_request(
        self, name: str, prompt: list[int], params: Request, lora_request: Any, priority: int
    ) -> None:
        if prompt[0] == 13:
            raise ValueError("unlucky")
        self.requests[name] = [list(prompt), params.sampling.max_new_tokens]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.requests.pop(name)

    def step(self) -> list[Any]:
        time.sleep(0.002)
        if self.fails:
            raise ValueError("out of memory")
        outputs = []
        for name, state in list(self.requests.items()):
            token = state[0][-1] + 1
            state[0].append(token)
            state[1] -= 1
            sample = SimpleNamespace(
                token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-0.5)}],
                finish_reason="length" if state[1] == 0 else None, stop_reason=None,
            )  # fmt: skip
            outputs.append(
                SimpleNamespace(
                    request_id=name, outputs=[sample], finished=state[1] == 0, num_cached_tokens=0
                )
            )
            if state[1] == 0:
                del self.requests[name]
        return outputs


class Words:
    def prompt(self, request: Request) -> list[int]:
        return [int(i) for i in request.token_ids]

    def sampling(self, request: Request, num_kept: int = 0) -> Request:
        return request


@pytest.fixture
def engine() -> LLMEngine:
    return LLMEngine()


@pytest.fixture
def loop(engine: LLMEngine) -> Iterator[VllmLoop]:
    loop = VllmLoop(engine, Words())  # type: ignore[arg-type]
    yield loop
    loop.close()


def start(loop: VllmLoop, name: str, first: int = 0, length: int = 20) -> Any:
    sampling = SamplingParams(max_new_tokens=length)
    job = Job(Flight(Request(id=name, token_ids=np.array([first], np.int32), sampling=sampling), None))
    loop.submit([job])
    return job.flight.future


def test_requests_run_to_their_end(loop: VllmLoop) -> None:
    futures = [start(loop, str(i), first=100 * i) for i in range(1, 4)]
    for index, future in enumerate(futures, start=1):
        assert future.result(10).token_ids.tolist() == list(range(100 * index + 1, 100 * index + 21))
    assert loop.stats().num_generated_tokens == 60 and loop.stats().num_running == 0


def test_what_an_update_interrupts_goes_on_with_its_tokens_and_both_versions(
    loop: VllmLoop, engine: LLMEngine
) -> None:
    future = start(loop, "long", length=400)
    while not loop.stats().num_generated_tokens:
        time.sleep(0.005)
    loop.commands.call("pause", lambda: loop.set_pause(PauseMode.INTERRUPT))

    def update() -> None:
        loop.take_out()
        loop.version = PolicyVersion(1)
        loop.put_back()

    loop.commands.call("update", update)
    assert not engine.requests and len(engine.aborted) == 1 and not future.done()
    loop.commands.call("resume", lambda: loop.set_pause(None))
    done: Completion = future.result(20)
    assert done.token_ids.tolist() == list(range(1, 401)) and set(done.versions.tolist()) == {0, 1}


def test_an_abort_keeps_the_tokens_and_a_refusal_is_the_requests_own(loop: VllmLoop) -> None:
    future, refused = start(loop, "gone", length=10_000), start(loop, "bad", first=13)
    with pytest.raises(Exception, match="unlucky"):
        refused.result(10)
    while not loop.stats().num_generated_tokens:
        time.sleep(0.005)
    loop.commands.call("abort", lambda: loop.abort(["gone"]))
    done = future.result(10)
    assert done.stop_reason is StopReason.ABORTED and 0 < len(done.token_ids) < 10_000


def test_every_caller_hears_of_a_failure_and_of_the_end(loop: VllmLoop, engine: LLMEngine) -> None:
    engine.fails = True
    with pytest.raises(EngineError, match="out of memory"):
        start(loop, "lost").result(10)
    assert loop.unavailable is not None
    loop.close()
    with pytest.raises(EngineError, match="closed"):
        loop.commands.call("pause", lambda: None)
