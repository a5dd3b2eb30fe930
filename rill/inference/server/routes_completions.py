"""POST /v1/completions: text or token ids in, text (and token ids) out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from rill.inference.base import AdapterEngine, Completion, Feature
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import DONE, event, json_response, respond
from rill.inference.server.choices import (
    as_piece,
    completion_logprobs,
    finish_reason,
    stop_detail,
    token_fields,
    usage,
)
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece, SampleStream, finite
from rill.inference.server.sampling import (
    build_requests,
    new_id,
    num_top_logprobs,
    refuse_unsupported,
    resolve_model,
)
from rill.inference.server.schemas import CompletionBody
from rill.inference.server.state import ServerState, state_of
from rill.inference.server.text import TextCodec, TextStream

routes = APIRouter()


@routes.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request) -> Response:
    state = state_of(request)
    caller = state.keys.check_client(request)
    _refuse(body)
    answer = _Answer(state, body, await encode_prompts(state.codec, body.prompt, param="prompt"))
    if body.max_tokens == 0:
        with state.admission.admit(caller):
            return json_response(await answer.scored())
    return await respond(
        state,
        caller,
        answer.requests(),
        request,
        name=answer.name,
        is_streamed=bool(body.stream),
        whole=answer.whole,
        events=answer.events,
    )


def _refuse(body: CompletionBody) -> None:
    refuse_unsupported(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of other than n is not supported", "best_of", "unsupported")
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix", "unsupported")
    if body.stream and body.echo:
        raise bad_request("echo cannot be streamed", "echo", "unsupported")
    if body.max_tokens == 0 and (not body.echo or body.stream or (body.n or 1) != 1):
        raise bad_request("max_tokens of 0 needs echo, n=1 and no stream: it scores the prompt", "max_tokens")


async def encode_prompts(
    codec: TextCodec,
    given: str | list[str] | list[int] | list[list[int]],
    *,
    param: str,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """One or several texts, or lists of token ids."""
    if not given:
        raise bad_request(f"the {param} is empty", param)
    several: Sequence[str | list[int]]
    if isinstance(given, str):
        several = [given]
    elif isinstance(given[0], int):
        several = [[token for token in given if isinstance(token, int)]]
    else:
        several = [each for each in given if not isinstance(each, int)]
    encoded = [
        await codec.encode(each, add_special_tokens=add_special_tokens) if isinstance(each, str) else each
        for each in several
    ]
    if not all(encoded):
        raise bad_request(f"a text of {param} has no tokens", param)
    return encoded


class _Answer:
    """Builds the answer to one request, whole or in events."""

    def __init__(self, state: ServerState, body: CompletionBody, prompts: list[list[int]]) -> None:
        self._state, self._body, self._prompts = state, body, prompts
        self._id = new_id("cmpl")
        self.name = body.request_id or self._id
        self._created = int(time.time())
        self._num_samples = body.n or 1
        self._model = body.model or state.config.model_name

    def requests(self) -> list[EngineRequest]:
        return build_requests(
            self._body,
            self._prompts,
            request_id=self._id,
            max_tokens=self._body.max_tokens,
            engine=self._state.engine,
            config=self._state.config,
            num_top=num_top_logprobs(self._num_top(), self._state.engine, "logprobs"),
        )

    def _num_top(self) -> int | None:
        """The sampled token's own is always there; greedily it is also the likeliest."""
        count = self._body.logprobs
        return 0 if count == 1 and self._body.temperature == 0 else count

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(completions):
            text = self._text_stream().feed(completion.token_ids.tolist(), is_last=True)
            choices.append(self._choice(as_piece(index, completion), text, 0))
        if self._body.echo:
            await self._prepend_prompts(choices)
        return self._envelope(choices) | {"usage": usage(sum(map(len, self._prompts)), completions)}

    async def scored(self) -> dict[str, Any]:
        """max_tokens 0 with echo: the prompt and its log-probabilities, nothing generated."""
        resolve_model(self._body.model, self._state.engine, self._state.config)
        choices: list[dict[str, Any]] = [
            {"index": i, "text": "", "finish_reason": "length", "logprobs": None, "stop_reason": None}
            for i in range(len(self._prompts))
        ]
        await self._prepend_prompts(choices)
        return self._envelope(choices) | {"usage": usage(sum(map(len, self._prompts)), [])}

    async def events(self, stream: SampleStream) -> AsyncIterator[bytes]:
        texts = [self._text_stream() for _ in range(self._num_samples * len(self._prompts))]
        num_read = [0] * len(texts)
        completions: list[Completion] = []
        async for pieces in stream:
            out = []
            for piece in pieces:
                offset = len(texts[piece.index].text)
                text = texts[piece.index].feed(piece.token_ids.tolist(), is_last=piece.completion is not None)
                is_first = num_read[piece.index] == 0
                num_read[piece.index] += 1
                choice = self._choice(piece, text, offset)
                if self._body.return_token_ids and not is_first:
                    choice.pop("prompt_token_ids", None)
                out.append(event(self._envelope([choice])))
                if piece.completion is not None:
                    completions.append(piece.completion)
            yield b"".join(out)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            total = usage(sum(map(len, self._prompts)), completions)
            yield event(self._envelope([]) | {"usage": total})
        yield DONE

    def _choice(self, piece: Piece, text: str, offset: int) -> dict[str, Any]:
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
                self._state.codec,
                piece.token_ids.tolist(),
                finite(piece.logprobs),
                as_ids=bool(self._body.return_tokens_as_token_ids),
                offset=offset,
                piece=piece,
            )
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[piece.index // self._num_samples]
            choice |= token_fields(piece)
        return choice

    async def _prepend_prompts(self, choices: list[dict[str, Any]]) -> None:
        """echo: the prompt's text, and its log-probabilities where they were asked for."""
        codec = self._state.codec
        texts = [codec.decode(p) for p in self._prompts]
        scores = await self._prompt_scores() if self._body.logprobs is not None else None
        for choice in choices:
            prompt_index = choice["index"] // self._num_samples
            choice["text"] = texts[prompt_index] + choice["text"]
            if scores is None:
                continue
            first: list[float | None] = [None, *finite(scores[prompt_index])[1:]]
            as_ids = bool(self._body.return_tokens_as_token_ids)
            head = completion_logprobs(codec, self._prompts[prompt_index], first, as_ids=as_ids, offset=0)
            tail = choice["logprobs"] or {key: [] for key in head}
            shift = len(texts[prompt_index])
            tail["text_offset"] = [at + shift for at in tail["text_offset"]]
            choice["logprobs"] = {key: head[key] + tail[key] for key in head}

    async def _prompt_scores(self) -> list[Any]:
        if Feature.SCORE not in self._state.engine.features:
            raise bad_request(
                "this engine cannot score prompts: echo without logprobs", "logprobs", "unsupported"
            )
        return await score(self._state, self._prompts, self._body.model)

    def _text_stream(self) -> TextStream:
        stop = self._body.stop
        return TextStream(
            self._state.codec,
            stop=[stop] if isinstance(stop, str) else stop or [],
            skip_special_tokens=self._body.skip_special_tokens,
            include_stop=self._body.include_stop_str_in_output,
        )

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


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
