"""POST /v1/completions: text or token ids in, text (and token ids) out. POST /v1/embeddings, of the same inputs: the
hidden state of the last token of each, of length 1."""

from __future__ import annotations

import asyncio
import base64
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
from starlette.responses import Response

from rill.inference.base import EmbeddingEngine, Feature
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import LOGPROB_LISTS, OpenAIAnswer, completion_logprobs, respond
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
    if body.max_tokens == 0 and (not body.echo or body.stream or body.n != 1):
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
    with state.admission:
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
        self.writes_tokens |= body.logprobs is not None
        self._num_samples = body.n
        self._texts: dict[int, TextStream] = {}
        """By sample, once it has begun."""
        self._echoed = (
            [state.codec.decode(prompt) for prompt in prompts] if body.echo else [""] * len(prompts)
        )
        self._hears_ahead = state.codec.is_bytes and not body.stops
        """The text of a whole answer would be the same were it made as its tokens come."""
        self._num_heard: defaultdict[int, int] = defaultdict(int)
        """By sample, tokens of a whole answer whose text is made."""
        self._offsets: dict[int, int] = {}
        """By sample, where the text of its next token begins."""

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
            is_streamed=self.is_streamed,
        )

    async def whole(self, samples: Samples) -> dict[str, Any]:
        choices = [
            self._choice(piece, lists, self._whole_text(piece), is_first=True)
            for piece, lists in await self.wholes(samples)
        ] or [
            {"index": i, "text": "", "finish_reason": "length", "logprobs": None, "stop_reason": None}
            for i in range(len(self.prompts))
        ]
        if self.body.echo:
            await self._prepend_prompts(choices)
        return self.envelope(choices, is_chunk=False) | self.usage(samples)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        is_first = piece.index not in self._texts
        if not is_first:  # the text that is out may be behind its tokens
            self._offsets[piece.index] = len(self._texts[piece.index].text)
        choice = self._choice(piece, self.lists(piece), self._hear(piece), is_first=is_first)
        return self.envelope([choice], is_chunk=True)

    def lists(self, piece: Piece) -> dict[str, Any]:
        if self.body.logprobs is None:
            return super().lists(piece)
        offset = self._offsets.get(piece.index)
        if offset is None:
            offset = len(self._echoed[piece.index // self._num_samples])
        told, self._offsets[piece.index] = self._logprobs(piece, offset)
        return super().lists(piece) | told

    def write(self, piece: Piece) -> None:
        super().write(piece)
        if self._hears_ahead and piece.completion is None:
            self._hear(piece)
            self._num_heard[piece.index] += len(piece.token_ids)

    def _whole_text(self, piece: Piece) -> str:
        num_heard = self._num_heard[piece.index]
        if num_heard == len(piece.token_ids):  # its last token too, which may be no text: once more
            self._texts.pop(piece.index, None)
            num_heard = 0
        self._hear(Piece(index=piece.index, completion=piece.completion, **piece.part(num_heard)))
        return self._texts[piece.index].text

    def _hear(self, piece: Piece) -> str:
        """The text that became final with it."""
        if piece.index not in self._texts:
            prompt = self.prompts[piece.index // self._num_samples]
            self._texts[piece.index] = TextStream(self.state.codec, self.body, before=prompt)
        return self._texts[piece.index].hear(piece)

    def _choice(self, piece: Piece, lists: dict[str, Any], text: str, *, is_first: bool) -> dict[str, Any]:
        choice = self.choice(piece, lists) | {"text": text}
        if self.body.logprobs is not None:
            choice["logprobs"] = {name: lists[name] for name in LOGPROB_LISTS}
        if self.body.return_token_ids and is_first:
            choice["prompt_token_ids"] = self.prompts[piece.index // self._num_samples]
        return choice

    def _logprobs(self, piece: Piece, offset: int) -> tuple[dict[str, Any], int]:
        as_ids = self.body.return_tokens_as_token_ids
        return completion_logprobs(self.state.codec, piece, as_ids=as_ids, offset=offset)

    async def _prepend_prompts(self, choices: list[dict[str, Any]]) -> None:
        """echo: the prompt's text, and its log-probabilities where they were asked for."""
        for choice in choices:
            choice["text"] = self._echoed[choice["index"] // self._num_samples] + choice["text"]
        if self.body.logprobs is None:
            return
        scores = await score(self.state, self.prompts, self.body.model)
        for choice in choices:
            prompt_index = choice["index"] // self._num_samples
            head, _ = self._logprobs(_as_piece(self.prompts[prompt_index], scores[prompt_index]), 0)
            head["token_logprobs"][0] = head["top_logprobs"][0] = None  # nothing stands before it
            columns = self._columns[choice["index"]]
            columns.add(head, in_front=True)
            choice["logprobs"] = {name: lists for name, lists in columns.whole().items() if name in head}


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
