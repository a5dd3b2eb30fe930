"""The engine as environments see it: nobody waits for an answer that cannot come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from rill.errors import TooLongError
from rill.inference.base import Completion, Request
from rill.types import SamplingParams, StopReason
from rill.workflows.policy_client import PolicyClient

PROMPT = np.array([1, 2, 3], np.int32)


class BrokenEngine:
    """Raises what no engine should."""

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        raise ZeroDivisionError("a bug")


class AbortingEngine:
    """Says so many tokens, and is stopped there."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.client: PolicyClient | None = None

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        assert self.client is not None
        self.client.put_back()
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
        client = PolicyClient(engine, seed=0, decode=str)  # type: ignore[arg-type]
        if isinstance(engine, AbortingEngine):
            engine.client = client
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

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        if any(len(request.token_ids) > 5 for request in requests):
            raise TooLongError("at most 5 tokens fit")
        return [answered(request, 2, StopReason.EOS) for request in requests]


def test_a_prompt_that_does_not_fit_costs_its_own_episode_alone() -> None:
    async def work() -> list[Completion | BaseException]:
        client = PolicyClient(PickyEngine(), seed=0, decode=str)  # type: ignore[arg-type]
        prompts = [PROMPT, np.ones(9, np.int32), PROMPT]
        asked = (
            client.episode(f"t{n}").generate(p, SamplingParams(), name="a") for n, p in enumerate(prompts)
        )
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10.0)

    first, second, third = asyncio.run(work())
    assert isinstance(first, Completion) and isinstance(third, Completion)
    assert isinstance(second, TooLongError)


def test_an_answer_cut_off_is_kept_for_later() -> None:
    answers: dict[str, Completion] = {}
    with pytest.raises(asyncio.CancelledError):
        ask(AbortingEngine(3), answers)
    assert [len(answer.token_ids) for answer in answers.values()] == [3]


def test_an_answer_stopped_with_its_last_token_is_whole() -> None:
    answers: dict[str, Completion] = {}
    completion = ask(AbortingEngine(4), answers)
    assert completion.stop_reason is StopReason.LENGTH and list(answers.values()) == [completion]
