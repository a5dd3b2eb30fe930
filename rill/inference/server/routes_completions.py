"""POST /v1/completions: text or token ids in, text (and token ids) out. POST /v1/embeddings, of the same inputs: the
hidden state of the last token of each, of length 1."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from starlette.responses import Response

from rill.inference.base import AdapterEngine, Completion, EmbeddingEngine, Feature
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import OpenAIAnswer, respond
from rill.inference.server.choices import completion_logprobs, finish_reason, stop_detail, token_fields
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece, finite
from rill.inference.server.http import Access, Call, Routes, json_response
from rill.inference.server.sampling import build_requests, num_top_logprobs, resolve_model
from rill.inference.server.schemas import CompletionBody, EmbeddingsBody, Prompts
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec, TextStream
from rill.types import Floats

routes = Routes()


@routes.post("/v1/completions", Access.CLIENT)
async def create_completion(call: Call, body: CompletionBody) -> Response:
    state = call.state
    _refuse(body)
    answer = _Answer(state, body, await encode_prompts(state.codec, body.prompt, param="prompt"))
    if body.max_tokens == 0:
        with state.admission.admit():
            return json_response(await answer.scored())
    return await respond(call, answer)


@routes.post("/v1/embeddings", Access.CLIENT)
async def create_embeddings(call: Call, body: EmbeddingsBody) -> Response:
    state, engine = call.state, call.state.engine
    if resolve_model(body.model, engine, state.config) is not None:
        raise bad_request("embeddings come from the base model only", "model", "unsupported")
    if Feature.EMBED not in engine.features or not isinstance(engine, EmbeddingEngine):
        raise bad_request("this engine makes no embeddings", "model", "unsupported")
    prompts = await encode_prompts(
        state.codec, body.input, param="input", add_special_tokens=body.add_special_tokens
    )
    if len(prompts) > state.config.max_samples:
        raise bad_request(f"{len(prompts)} texts are more than {state.config.max_samples}", "input")
    sequences = [np.asarray(ids, dtype=np.int32) for ids in prompts]
    timeout_s = state.config.request_timeout_s or 3600.0
    with state.admission.admit():
        found = await asyncio.to_thread(engine.embed, sequences, timeout_s)
    count = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(values, body.encoding_format)}
        for index, values in enumerate(found)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    model = body.model or state.config.model_name
    return json_response({"object": "list", "model": model, "data": data, "usage": usage})


def _refuse(body: CompletionBody) -> None:
    if body.stream and body.echo:
        raise bad_request("echo cannot be streamed", "echo", "unsupported")
    if body.max_tokens == 0 and (not body.echo or body.stream or (body.n or 1) != 1):
        raise bad_request("max_tokens of 0 needs echo, n=1 and no stream: it scores the prompt", "max_tokens")


async def encode_prompts(
    codec: TextCodec,
    given: Prompts,
    *,
    param: str,
    add_special_tokens: bool = True,
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


class _Answer(OpenAIAnswer):
    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, state: ServerState, body: CompletionBody, prompts: list[list[int]]) -> None:
        super().__init__(state, body, prompts)
        self._body = body
        self._num_samples = body.n or 1
        self._texts: dict[int, TextStream] = {}
        """By sample, once it has begun."""

    def requests(self) -> list[EngineRequest]:
        return build_requests(
            self._body,
            self.prompts,
            request_id=self.id,
            max_tokens=self._body.max_tokens,
            engine=self.state.engine,
            config=self.state.config,
            num_top=num_top_logprobs(self._num_top(), self.state.engine, "logprobs"),
        )

    def _num_top(self) -> int | None:
        """The sampled token's own is always there; greedily it is also the likeliest."""
        count = self._body.logprobs
        return 0 if count == 1 and self._body.temperature == 0 else count

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(Piece.of(index, completion)) for index, completion in enumerate(completions)]
        if self._body.echo:
            await self._prepend_prompts(choices)
        return self.envelope(choices, is_chunk=False) | self.usage(completions)

    async def scored(self) -> dict[str, Any]:
        """max_tokens 0 with echo: the prompt and its log-probabilities, nothing generated."""
        resolve_model(self._body.model, self.state.engine, self.state.config)
        choices: list[dict[str, Any]] = [
            {"index": i, "text": "", "finish_reason": "length", "logprobs": None, "stop_reason": None}
            for i in range(len(self.prompts))
        ]
        await self._prepend_prompts(choices)
        return self.envelope(choices, is_chunk=False) | self.usage([])

    def chunk(self, piece: Piece) -> dict[str, Any]:
        is_first = piece.index not in self._texts
        choice = self._choice(piece)
        if not is_first:
            choice.pop("prompt_token_ids", None)
        return self.envelope([choice], is_chunk=True)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        stream = self._texts.get(piece.index) or self._texts.setdefault(
            piece.index, TextStream(self.state.codec, self._body)
        )
        offset = len(stream.text)
        text = stream.feed(piece.token_ids.tolist(), is_last=piece.completion is not None)
        completion = piece.completion
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": text,
            "finish_reason": None if completion is None else finish_reason(completion),
            "stop_reason": stop_detail(completion),
            "logprobs": None,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(
                self.state.codec,
                piece.token_ids.tolist(),
                finite(piece.logprobs),
                as_ids=bool(self._body.return_tokens_as_token_ids),
                offset=offset,
                piece=piece,
            )
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self.prompts[piece.index // self._num_samples]
            choice |= token_fields(piece)
        return choice

    async def _prepend_prompts(self, choices: list[dict[str, Any]]) -> None:
        """echo: the prompt's text, and its log-probabilities where they were asked for."""
        codec = self.state.codec
        texts = [codec.decode(p) for p in self.prompts]
        scores = await self._prompt_scores() if self._body.logprobs is not None else None
        for choice in choices:
            prompt_index = choice["index"] // self._num_samples
            choice["text"] = texts[prompt_index] + choice["text"]
            if scores is None:
                continue
            first: list[float | None] = [None, *finite(scores[prompt_index])[1:]]
            as_ids = bool(self._body.return_tokens_as_token_ids)
            head = completion_logprobs(codec, self.prompts[prompt_index], first, as_ids=as_ids, offset=0)
            tail = choice["logprobs"] or {key: [] for key in head}
            shift = len(texts[prompt_index])
            tail["text_offset"] = [at + shift for at in tail["text_offset"]]
            choice["logprobs"] = {key: head[key] + tail[key] for key in head}

    async def _prompt_scores(self) -> list[Any]:
        if Feature.SCORE not in self.state.engine.features:
            raise bad_request(
                "this engine cannot score prompts: echo without logprobs", "logprobs", "unsupported"
            )
        return await score(self.state, self.prompts, self._body.model)


async def score(state: ServerState, prompts: Sequence[Sequence[int]], model: str | None) -> list[Any]:
    """The engine's score, by the model or the adapter of that name, off the event loop."""
    adapter = resolve_model(model, state.engine, state.config)
    sequences = [np.asarray(p, dtype=np.int32) for p in prompts]
    timeout_s = state.config.request_timeout_s or 3600.0
    if adapter is None:
        return await asyncio.to_thread(state.engine.score, sequences, 1.0, timeout_s)
    engine = state.engine
    assert isinstance(engine, AdapterEngine)
    return await asyncio.to_thread(engine.score, sequences, 1.0, timeout_s, adapter=adapter)


def _written(values: Floats, form: str) -> Any:
    unit = (values / max(float(np.linalg.norm(values)), 1e-12)).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if form == "base64" else unit.tolist()
