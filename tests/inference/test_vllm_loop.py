"""The loop that drives vLLM, around an engine that has vLLM's methods: one token for every request in each step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rill.errors import EngineDiedError, EngineError, RequestError, UnsupportedError
from rill.inference.base import Completion, Delta, Feature, NamedTensors, PauseMode, Request
from rill.inference.vllm import VllmEngine, VllmWords
from rill.types import PolicyVersion, SamplingParams, StopReason


class LLMEngine:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.fails = False
        self.forgets = True

    def add_request(
        self, name: str, prompt: list[int], params: Request, lora_request: Any, priority: int
    ) -> None:
        if prompt[0] == 13:
            raise ValueError("unlucky")
        self.requests[name] = [list(prompt), params.sampling.max_new_tokens]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.requests.pop(name, None)

    def reset_prefix_cache(self) -> bool:
        return self.forgets

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
            told = [None, *({other: SimpleNamespace(logprob=-other / 8)} for other in state[0][1:-1])]
            outputs.append(
                SimpleNamespace(
                    request_id=name, outputs=[sample], finished=state[1] == 0, num_cached_tokens=0, prompt_logprobs=told
                )
            )  # fmt: skip
            if state[1] == 0:
                del self.requests[name]
        return outputs


class Words:
    def prompt(self, request: Request) -> list[int]:
        return [int(i) for i in request.token_ids]

    def sampling(self, request: Request) -> Request:
        return request

    def scoring(self) -> Request:
        return request("", length=1)


class Driven(VllmEngine):
    def __init__(self, llm: LLMEngine) -> None:
        self._folder = None
        self._drive_engine(llm, Words())  # type: ignore[arg-type]

    features = frozenset({Feature.STREAM, Feature.SCORE, Feature.UPDATE_WEIGHTS})

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        await self._emptied()


@pytest.fixture
def llm() -> LLMEngine:
    return LLMEngine()


@pytest.fixture
def engine(llm: LLMEngine) -> Iterator[VllmEngine]:
    engine = Driven(llm)
    engine.max_context = 1_000_000
    yield engine
    engine.close()


def request(name: str, first: int = 1, length: int = 20) -> Request:
    sampling = SamplingParams(max_new_tokens=length)
    return Request(id=name, token_ids=np.array([first], np.int32), sampling=sampling)


def until_it_runs(engine: VllmEngine) -> None:
    deadline = time.monotonic() + 20
    while not engine.stats().num_generated_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_run_to_their_end(engine: VllmEngine) -> None:
    done = engine.generate([request(str(i), first=100 * i) for i in range(1, 4)], 20.0)
    for index, completion in enumerate(done, start=1):
        assert completion.token_ids.tolist() == list(range(100 * index + 1, 100 * index + 21))
    assert engine.stats().num_generated_tokens == 60 and engine.stats().num_running == 0


def test_texts_are_scored_by_their_own_tokens_while_requests_run(engine: VllmEngine) -> None:
    (future,) = engine.submit([request("long", length=200)])
    scores = engine.score([np.array(ids, np.int32) for ids in ([3, 4, 8], [9], [5, 6])])
    assert [each.tolist() for each in scores] == [[0, -0.5, -1], [0], [0, -0.75]]
    with pytest.raises(UnsupportedError, match="temperature 1"):
        engine.score([np.array([3], np.int32)], temperature=0.5)
    with pytest.raises(RequestError, match="token_ids"):
        engine.score([np.array([], np.int32)])
    assert len(future.result(20).token_ids) == 200


def test_what_an_update_interrupts_goes_on_with_its_tokens_and_both_versions(
    engine: VllmEngine, llm: LLMEngine
) -> None:
    (future,) = engine.submit([request("long", length=400)])
    until_it_runs(engine)
    engine.pause(PauseMode.INTERRUPT)
    engine.update_weights([], PolicyVersion(1))
    assert not llm.requests and len(llm.aborted) == 1 and not future.done()
    engine.resume()
    done: Completion = future.result(20)
    assert done.token_ids.tolist() == list(range(2, 402)) and set(done.versions.tolist()) == {0, 1}


def test_requests_go_on_after_a_flush_also_where_vllm_refuses_it(engine: VllmEngine, llm: LLMEngine) -> None:
    (future,) = engine.submit([request("long", length=400)])
    until_it_runs(engine)
    llm.forgets = False
    with pytest.raises(EngineError, match="was not reset"):
        engine.flush()
    assert future.result(20).token_ids.tolist() == list(range(2, 402))


def test_an_abort_keeps_the_tokens_and_a_refusal_is_the_requests_own(engine: VllmEngine) -> None:
    future, refused = engine.submit([request("gone", length=10_000), request("bad", first=13)])
    with pytest.raises(Exception, match="unlucky"):
        refused.result(10)
    until_it_runs(engine)
    engine.abort(["gone"])
    done = future.result(10)
    assert done.stop_reason is StopReason.ABORTED and 0 < len(done.token_ids) < 10_000


def test_whoever_hears_of_a_token_may_abort(engine: VllmEngine) -> None:
    def on_delta(delta: Delta) -> None:
        if delta.token_ids[-1] == 5:
            engine.abort()

    (future,) = engine.submit([request("enough", length=10_000)], on_delta)
    assert future.result(10).stop_reason is StopReason.ABORTED


def test_every_caller_hears_of_a_failure_and_of_the_end(engine: VllmEngine, llm: LLMEngine) -> None:
    llm.fails = True
    with pytest.raises(EngineError, match="out of memory"):
        engine.generate([request("lost")], 10.0)
    with pytest.raises(EngineError, match="vLLM failed"):
        engine.submit([request("late")])
    with pytest.raises(EngineDiedError, match="out of memory"):
        engine.stats()  # what a server's /health asks
    engine.close()
    with pytest.raises(EngineError, match="closed|vLLM failed"):
        engine.submit([request("later")])


def test_an_adapter_in_anothers_place_has_a_name_of_its_own_in_vllms_cache() -> None:
    request = SimpleNamespace(LoRARequest=lambda *fields: fields)
    words = VllmWords(SimpleNamespace(lora=SimpleNamespace(request=request)))
    (before, *_), (after, *_) = words.adapter("a", 1, "folder"), words.adapter("a", 2, "folder")
    assert before != after and before.startswith("a") and after.startswith("a")
