"""POST /v1/completions: text or token ids in, text (and token ids) out. POST /v1/embeddings, of the same inputs: the
hidden state of the last token of each, of length 1."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
from starlette.responses import Response

from rill.inference.base import EmbeddingEngine, Feature
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import OpenAIAnswer, completion_logprobs, respond
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece, Samples
from rill.inference.server.http import Access, Call, Routes
from rill.inference.server.sampling import build_requests
from rill.inference.server.schemas import CompletionBody, EmbeddingsBody, Prompts
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec, TextStream
from rill.types import Floats

_READERS = ThreadPoolExecutor(16, thread_name_prefix="server-reader")
"""They wait for texts that are read. Threads of their own: neither health checks nor the server's end wait for them."""

routes = Routes()


@routes.post("/v1/completions", Access.CLIENT)
async def create_completion(call: Call, body: CompletionBody) -> Response:
    if body.stream and body.echo:
        raise bad_request("echo cannot be streamed", "echo", "unsupported")
    if body.max_tokens == 0 and (not body.echo or body.stream or (body.n or 1) != 1):
        raise bad_request("max_tokens of 0 needs echo, n=1 and no stream: it scores the prompt", "max_tokens")
    prompts = await _encode_all(call.state.codec, body.prompt, param="prompt")
    return await respond(call, _Answer(call.state, body, prompts))


@routes.post("/v1/embeddings", Access.CLIENT)
async def create_embeddings(call: Call, body: EmbeddingsBody) -> dict[str, Any]:
    state, engine = call.state, call.state.engine
    if state.adapter_of(body.model) is not None:
        raise bad_request("embeddings come from the base model only", "model", "unsupported")
    state.require(Feature.EMBED, "model", "this engine makes no embeddings")
    assert isinstance(engine, EmbeddingEngine)
    prompts = await _encode_all(
        state.codec, body.input, param="input", add_special_tokens=body.add_special_tokens
    )
    _check_count(state, prompts, "input")
    sequences = [np.asarray(ids, dtype=np.int32) for ids in prompts]
    with state.admission.admit():
        found = await _read(state, engine.embed, sequences)
    count = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(values, body.encoding_format)}
        for index, values in enumerate(found)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    model = body.model or state.config.model_name
    return {"object": "list", "model": model, "data": data, "usage": usage}


async def _encode_all(
    codec: TextCodec, given: Prompts, *, param: str, add_special_tokens: bool = True
) -> list[list[int]]:
    """One or several texts, or lists of token ids."""
    if not given:
        raise bad_request(f"the {param} is empty", param)
    is_one = isinstance(given, str) or isinstance(given[0], int)
    encoded: list[list[int]] = [
        await codec.encode(each, add_special_tokens=add_special_tokens) if isinstance(each, str) else each
        for each in cast(Sequence[str | list[int]], [given] if is_one else given)
    ]
    if not all(encoded):
        raise bad_request(f"a text of {param} has no tokens", param)
    return encoded


def _check_count(state: ServerState, prompts: Sequence[Any], param: str) -> None:
    if len(prompts) > state.config.max_samples:
        raise bad_request(f"{len(prompts)} texts are more than {state.config.max_samples}", param)


class _Answer(OpenAIAnswer):
    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, state: ServerState, body: CompletionBody, prompts: list[list[int]]) -> None:
        super().__init__(state, body, prompts)
        self.body: CompletionBody = body
        self._num_samples = body.n or 1
        self._texts: dict[int, TextStream] = {}
        """By sample, once it has begun."""

    def requests(self) -> list[EngineRequest]:
        body = self.body
        if body.echo and body.logprobs is not None:
            what = "this engine cannot score prompts: echo without logprobs"
            self.state.require(Feature.SCORE, "logprobs", what)
        if body.max_tokens == 0:  # with echo: the prompt is scored, nothing is generated
            self.state.adapter_of(body.model)
            _check_count(self.state, self.prompts, "prompt")
            return []
        return build_requests(
            self.state,
            body,
            self.prompts,
            request_id=self.id,
            max_tokens=body.max_tokens,
            # The sampled token's own is always there; greedily it is also the likeliest.
            num_top=0 if body.logprobs == 1 and body.temperature == 0 else body.logprobs,
            top_param="logprobs",
        )

    async def whole(self, samples: Samples) -> dict[str, Any]:
        choices = [self._choice(piece) for piece in await samples.whole()] or [
            {"index": i, "text": "", "finish_reason": "length", "logprobs": None, "stop_reason": None}
            for i in range(len(self.prompts))
        ]
        if self.body.echo:
            await self._prepend_prompts(choices)
        return self.envelope(choices, is_chunk=False) | self.usage(samples)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self.envelope([self._choice(piece)], is_chunk=True)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        prompt, choice = self.prompts[piece.index // self._num_samples], self.choice(piece)
        if is_first := piece.index not in self._texts:
            self._texts[piece.index] = TextStream(self.state.codec, self.body, before=prompt)
        stream = self._texts[piece.index]
        offset = len(stream.text)
        choice["text"] = stream.hear(piece)
        if self.body.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece, offset)
        if self.body.return_token_ids and is_first:
            choice["prompt_token_ids"] = prompt
        return choice

    def _logprobs(self, piece: Piece, offset: int) -> dict[str, Any]:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return completion_logprobs(self.state.codec, piece, as_ids=as_ids, offset=offset)

    async def _prepend_prompts(self, choices: list[dict[str, Any]]) -> None:
        """echo: the prompt's text, and its log-probabilities where they were asked for."""
        texts = [self.state.codec.decode(prompt) for prompt in self.prompts]
        for choice in choices:
            choice["text"] = texts[choice["index"] // self._num_samples] + choice["text"]
        if self.body.logprobs is None:
            return
        scores = await score(self.state, self.prompts, self.body.model)
        for choice in choices:
            prompt_index = choice["index"] // self._num_samples
            head = self._logprobs(_as_piece(self.prompts[prompt_index], scores[prompt_index]), 0)
            head["token_logprobs"][0] = head["top_logprobs"][0] = None  # nothing stands before it
            tail = choice["logprobs"] or {key: [] for key in head}
            shift = len(texts[prompt_index])
            tail["text_offset"] = [at + shift for at in tail["text_offset"]]
            choice["logprobs"] = {key: head[key] + tail[key] for key in head}


def _as_piece(prompt: Sequence[int], scores: Floats) -> Piece:
    ids = np.asarray(prompt)
    return Piece(index=0, token_ids=ids, logprobs=scores, versions=ids)


async def score(state: ServerState, prompts: Sequence[Sequence[int]], model: str | None) -> list[Any]:
    """The engine's score, by the model or the adapter of that name, off the event loop."""
    adapter = state.adapter_of(model)
    options = {} if adapter is None else {"adapter": adapter}
    sequences = [np.asarray(prompt, dtype=np.int32) for prompt in prompts]
    return await _read(state, state.engine.score, sequences, **options)


async def _read(state: ServerState, work: Callable[..., list[Any]], *args: Any, **options: Any) -> list[Any]:
    call = partial(work, *args, timeout_s=state.config.request_timeout_s or 3600.0, **options)
    return await asyncio.get_running_loop().run_in_executor(_READERS, call)


def _written(values: Floats, form: str) -> Any:
    unit = (values / max(float(np.linalg.norm(values)), 1e-12)).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if form == "base64" else unit.tolist()
