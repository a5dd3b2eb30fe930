"""The engine as environments see it: nobody waits for an answer that cannot come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rill.errors import TooLongError
from rill.inference.base import Completion, Feature, Request
from rill.inference.policy import EngineGate, PolicyClient
from rill.telemetry import trace
from rill.types import SamplingParams, StopReason

PROMPT = np.array([1, 2, 3], np.int32)


class BrokenEngine:
    """Raises what no engine should."""

    features: frozenset[Feature] = frozenset()

    def submit(self, requests: Sequence[Request], on_delta: Any = None) -> list[Future[Completion]]:
        raise ZeroDivisionError("a bug")


class AbortingEngine:
    """Says so many tokens, and is stopped there."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    features: frozenset[Feature] = frozenset()

    def submit(self, requests: Sequence[Request], on_delta: Any = None) -> list[Future[Completion]]:
        return [answered(request, self.num_tokens, StopReason.ABORTED) for request in requests]


def answered(request: Request, num_tokens: int, reason: StopReason) -> Future[Completion]:
    said = np.zeros(num_tokens)
    future: Future[Completion] = Future()
    future.set_result(
        Completion(
            request_id=request.id,
            token_ids=said.astype(np.int32),
            logprobs=said.astype(np.float32),
            versions=said.astype(np.int32),
            stop_reason=reason,
        )
    )
    return future


def ask(engine: BrokenEngine | AbortingEngine, answers: dict[str, Completion]) -> Completion:
    async def work() -> Completion:
        client = PolicyClient(EngineGate(engine), seed=0, decode=str)  # type: ignore[arg-type]
        episode = client.episode("t", answers)
        return await asyncio.wait_for(
            episode.generate(PROMPT, SamplingParams(max_new_tokens=4), name="a"), 10.0
        )

    return asyncio.run(work())


def test_whatever_an_engine_raises_reaches_those_who_asked() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        ask(BrokenEngine(), {})


class PickyEngine:
    """Refuses a whole submission for one request in it, as engines do."""

    features: frozenset[Feature] = frozenset()

    def submit(self, requests: Sequence[Request], on_delta: Any = None) -> list[Future[Completion]]:
        if any(len(request.token_ids) > 5 for request in requests):
            raise TooLongError("at most 5 tokens fit")
        return [answered(request, 2, StopReason.EOS) for request in requests]


def test_a_prompt_that_does_not_fit_costs_its_own_episode_alone() -> None:
    async def work() -> list[Completion | BaseException]:
        client = PolicyClient(EngineGate(PickyEngine()), seed=0, decode=str)  # type: ignore[arg-type]
        prompts = [PROMPT, np.ones(9, np.int32), PROMPT]
        asked = (
            client.episode(f"t{n}", {}).generate(p, SamplingParams(), name="a") for n, p in enumerate(prompts)
        )
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10.0)

    first, second, third = asyncio.run(work())
    assert isinstance(first, Completion) and isinstance(third, Completion)
    assert isinstance(second, TooLongError)


def test_an_episode_that_was_cancelled_as_it_asked_keeps_no_other_waiting() -> None:
    async def work() -> list[Completion | BaseException]:
        client = PolicyClient(EngineGate(BrokenEngine()), seed=0, decode=str)  # type: ignore[arg-type]
        asked = [
            asyncio.ensure_future(client.episode(f"t{n}", {}).generate(PROMPT, SamplingParams(), name="a"))
            for n in range(2)
        ]
        asyncio.get_running_loop().call_soon(asked[0].cancel)  # they have asked, and the engine has not heard
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10.0)

    first, second = asyncio.run(work())
    assert isinstance(first, asyncio.CancelledError) and isinstance(second, ZeroDivisionError)


def test_an_answer_cut_off_is_kept_for_later() -> None:
    answers: dict[str, Completion] = {}
    with pytest.raises(asyncio.CancelledError):
        ask(AbortingEngine(3), answers)
    assert [len(answer.token_ids) for answer in answers.values()] == [3]


def test_an_answer_stopped_with_its_last_token_is_whole() -> None:
    answers: dict[str, Completion] = {}
    completion = ask(AbortingEngine(4), answers)
    assert completion.stop_reason is StopReason.LENGTH and list(answers.values()) == [completion]


def test_an_answer_is_only_found_again_for_the_same_prompt() -> None:
    """Its name is made from the prompt's tokens: a tool that answers otherwise the second time gets a fresh answer."""
    answers: dict[str, Completion] = {}

    async def say(name: str) -> Completion:
        client = PolicyClient(EngineGate(PickyEngine()), seed=0, decode=str)  # type: ignore[arg-type]
        return await client.episode("t", answers).generate(PROMPT, SamplingParams(), name=name)

    first = asyncio.run(say("policy/5f0c"))
    assert asyncio.run(say("policy/5f0c")) is first
    assert asyncio.run(say("policy/77aa")) is not first and len(answers) == 2


class PatientEngine:
    """Says nothing until it is aborted."""

    def __init__(self) -> None:
        self.running: dict[str, Future[Completion]] = {}

    features: frozenset[Feature] = frozenset()

    def submit(self, requests: Sequence[Request], on_delta: Any = None) -> list[Future[Completion]]:
        self.running |= {request.id: Future() for request in requests}
        return [self.running[request.id] for request in requests]

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            request = Request(id=name, token_ids=PROMPT)
            self.running.pop(name).set_result(answered(request, 1, StopReason.ABORTED).result())


def test_a_stop_ends_what_runs_and_what_is_asked_later_of_that_epoch_and_nothing_of_the_next() -> None:
    engine = PatientEngine()
    gate = EngineGate(engine)  # type: ignore[arg-type]
    (running,) = gate.submit([Request(id="a", token_ids=PROMPT)], epoch=4)
    gate.stop(4)
    assert len(running.result(1.0).token_ids) == 1
    (late,) = gate.submit([Request(id="b", token_ids=PROMPT)], epoch=4)
    assert late.result(1.0).stop_reason is StopReason.ABORTED and len(late.result().token_ids) == 0
    (following,) = gate.submit([Request(id="c", token_ids=PROMPT)], epoch=5)
    gate.stop(4)
    assert not following.done() and list(engine.running) == ["c"]


def test_the_trace_says_when_an_engine_is_asked_for_anything(tmp_path: Path) -> None:
    trace.configure(tmp_path, "engine")
    try:
        gate = EngineGate(PatientEngine())  # type: ignore[arg-type]
        for epoch in range(2):
            gate.submit([Request(id=f"{epoch}{name}", token_ids=PROMPT) for name in "ab"], epoch)
            gate.stop(epoch)
        with pytest.raises(ZeroDivisionError):
            EngineGate(BrokenEngine()).submit([Request(id="c", token_ids=PROMPT)], 0)  # type: ignore[arg-type]
    finally:
        trace.shutdown()
    spans = [event for event in trace.read_trace(tmp_path) if event.name == "sampling"]
    assert [(event.kind, event.lane) for event in spans] == 3 * [("span", "engine")]


def test_an_engine_that_counts_its_draws_from_the_start_of_a_request_gets_another_seed_for_the_rest() -> None:
    asked: list[Request] = []

    class Keeping(PatientEngine):
        def submit(self, requests: Sequence[Request], on_delta: Any = None) -> list[Future[Completion]]:
            asked.extend(requests)
            return super().submit(requests)

    first = Request(id="a", token_ids=PROMPT, sampling=SamplingParams(seed=7))
    rest = Request(id="b", token_ids=PROMPT, sampling=SamplingParams(seed=7), num_generated=2)
    engine = Keeping()
    EngineGate(engine).submit([first, rest], epoch=0)  # type: ignore[arg-type]
    assert asked[0].sampling.seed == 7 and asked[1].sampling.seed not in (7, None)
    Keeping.features = frozenset({Feature.SEEDED_BY_POSITION})
    EngineGate(engine).submit([rest], epoch=0)  # type: ignore[arg-type]
    assert asked[2].sampling.seed == 7
