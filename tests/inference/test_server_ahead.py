"""Whole answers, which are written while their tokens come: the same however many come at a time, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rill.errors import EngineError
from rill.inference.base import Completion, Delta, EngineStats, Feature, Request, TopTokens
from rill.inference.server import ServerConfig, create_app
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

VOCAB = 103
PROMPTS = [[40, 41, 42], [43, 44]]


class Parts:
    """Says seeded tokens, and tells of them so many at a time."""

    features = frozenset({Feature.STREAM, Feature.TOP_LOGPROBS, Feature.SCORE})
    version = PolicyVersion(0)
    max_context = 512
    vocab_size = VOCAB

    def __init__(
        self, size: int | None, *, end: StopReason = StopReason.LENGTH, is_broken: bool = False
    ) -> None:
        self._size, self._end, self._is_broken = size, end, is_broken

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        futures = []
        for number, request in enumerate(requests):
            whole, future = self._answer(request, number), Future[Completion]()
            futures.append(future)
            if on_delta is not None and self._size is not None:
                for start in range(0, len(whole.token_ids), self._size):
                    part = whole.part(start, start + self._size)
                    is_last = start + self._size >= len(whole.token_ids)
                    on_delta(
                        Delta(
                            request_id=request.id, stop_reason=whole.stop_reason if is_last else None, **part
                        )
                    )
            asyncio.get_running_loop().call_later(
                0.06, self._finish, future, whole
            )  # the parts are heard first
        return futures

    def _finish(self, future: Future[Completion], whole: Completion) -> None:
        if self._is_broken:
            future.set_exception(EngineError("it broke"))
        else:
            future.set_result(whole)

    def _answer(self, request: Request, number: int) -> Completion:
        length, count = request.sampling.max_new_tokens, request.num_top_logprobs
        random = np.random.default_rng(number)
        top = TopTokens(
            token_ids=random.integers(0, VOCAB, (length, count)).astype(np.int32),
            logprobs=-random.random((length, count)).astype(np.float32),
        )
        ids = random.integers(9, VOCAB, length).astype(np.int32)
        if self._end is StopReason.EOS:
            ids[-1] = 2
        return Completion(
            request_id=request.id,
            token_ids=ids,
            logprobs=-random.random(length).astype(np.float32),
            versions=np.arange(length, dtype=np.int32) // 50,
            top=top if count else None,
            stop_reason=self._end,
            num_cached_tokens=1,
        )

    def score(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        return [-np.arange(len(ids), dtype=np.float32) for ids in sequences]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Nothing is under way for long."""

    def stats(self) -> EngineStats:
        return EngineStats()


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Of bytes and their pairs; many texts of it are not made of whole characters."""
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(letters[-VOCAB:])}, []))
    backend.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


TOKENIZERS = {"characters": build_char_tokenizer, "bytes": byte_tokenizer}
SHARED: dict[str, Any] = {"max_tokens": 200, "return_token_ids": True}
COMPLETION: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "logprobs": 2} | SHARED
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True} | SHARED
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("/inference/v1/generate", {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 200}}),
    "completions": ("/v1/completions", COMPLETION),
    "text alone": ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 200}),
    "ids as names": ("/v1/completions", COMPLETION | {"return_tokens_as_token_ids": True}),
    "echo": ("/v1/completions", COMPLETION | {"echo": True}),
    "stop": ("/v1/completions", COMPLETION | {"stop": ["q", "\ufffd\ufffd"]}),
    "chat": ("/v1/chat/completions", CHAT | {"top_logprobs": 1}),
}


async def ask(
    engine: Parts, path: str, body: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> httpx.Response:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    app = create_app(engine, tokenizer, ServerConfig(port=0))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body)


def told(response: httpx.Response) -> str:
    """As it stands, without what is of its own in every answer."""
    assert response.status_code == 200, response.text
    fields = json.loads(response.text)
    return json.dumps({k: v for k, v in fields.items() if k not in ("id", "created", "request_id")})


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("end", [StopReason.LENGTH, StopReason.EOS, StopReason.ABORTED])
@pytest.mark.asyncio
async def test_an_answer_is_the_same_however_many_tokens_come_at_a_time(
    what: str, kind: str, end: StopReason
) -> None:
    path, body = ASKED[what]
    tokenizer = TOKENIZERS[kind]()
    at_once, *in_parts = await asyncio.gather(
        *(ask(Parts(size, end=end), path, body, tokenizer) for size in (None, 7, 64, 100, 199))
    )
    for response in in_parts:
        assert told(response) == told(at_once)


@pytest.mark.asyncio
async def test_a_token_that_ends_a_text_is_none_of_it_though_it_was_told_before_the_end() -> None:
    class Early(Parts):
        """Its last part does not say that it is the last."""

        def submit(
            self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
        ) -> list[Future[Completion]]:
            assert on_delta is not None
            return super().submit(requests, lambda delta: on_delta(replace(delta, stop_reason=None)))

    path, body = "/v1/completions", {"prompt": PROMPTS[0]} | SHARED
    tokenizer = byte_tokenizer()
    at_once = await ask(Parts(None, end=StopReason.STOP), path, body, tokenizer)
    early = await ask(Early(100, end=StopReason.STOP), path, body, tokenizer)
    assert told(early) == told(at_once)


@pytest.mark.asyncio
async def test_an_answer_that_fails_after_many_tokens_is_an_error() -> None:
    path, body = ASKED["completions"]
    response = await ask(Parts(64, is_broken=True), path, body, byte_tokenizer())
    assert response.status_code == 503 and "it broke" in response.text
