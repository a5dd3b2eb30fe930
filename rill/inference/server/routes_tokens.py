"""Token routes: POST /inference/v1/generate (what verifiers 0.4 and prime-rl train through), /tokenize, /detokenize."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from rill.inference.base import Completion, Feature
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import Answer, finish_reason, logprob_entries, respond, usage
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece, Samples, finite
from rill.inference.server.http import DONE, Access, Call, Routes, event
from rill.inference.server.routes_completions import score
from rill.inference.server.sampling import build_requests, new_id
from rill.inference.server.schemas import DetokenizeBody, GenerateBody, TokenizeBody
from rill.inference.server.state import ServerState
from rill.inference.server.text import encode_chat

routes = Routes()


@routes.post("/inference/v1/generate", Access.CLIENT)
async def generate(call: Call, body: GenerateBody) -> Response:
    """Token ids in, token ids out, each with its log-probability and its policy version."""
    return await respond(call, _Answer(call.state, body))


@routes.post("/tokenize", Access.CLIENT)
async def tokenize(call: Call, body: TokenizeBody) -> dict[str, Any]:
    state = call.state
    state.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        tokens = await state.codec.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        tokens, _ = await encode_chat(state.codec, body)
    return {
        "count": len(tokens),
        "max_model_len": state.engine.max_context,
        "tokens": tokens,
        "token_strs": state.codec.token_texts(tokens) if body.return_token_strs else None,
    }


@routes.post("/detokenize", Access.CLIENT)
async def detokenize(call: Call, body: DetokenizeBody) -> dict[str, Any]:
    state = call.state
    state.adapter_of(body.model)
    if wrong := next((t for t in body.tokens if t >= state.codec.vocab_size), None):
        raise bad_request(f"token {wrong} is not in the vocabulary of {state.codec.vocab_size}", "tokens")
    return {"prompt": state.codec.decode(body.tokens, skip_special_tokens=False)}


class _Answer(Answer):
    def __init__(self, state: ServerState, body: GenerateBody) -> None:
        name = body.request_id or new_id("gen")
        super().__init__(name, is_streamed=body.stream, writes_tokens=True)
        self._state, self._body = state, body
        self._head: dict[str, Any] = {"request_id": self.name, "model": body.model}
        self._first: dict[str, Any] = {}

    def requests(self) -> list[EngineRequest]:
        """A max_tokens beyond the context is cut to it: a trainer asks for "as much as fits"."""
        state, body, sampling = self._state, self._body, self._body.sampling_params
        names = ("model", "cache_salt", "priority")  # they may stand beside the sampling parameters
        beside = {name: value for name in names if (value := getattr(body, name))}
        if sampling.prompt_logprobs is not None:
            what = "this engine cannot score prompts"
            state.require(Feature.SCORE, "sampling_params.prompt_logprobs", what)
        return build_requests(
            state,
            sampling.model_copy(update=beside) if beside else sampling,
            [body.token_ids],
            # A client may repeat its id; the engine's ids must differ.
            request_id=new_id("gen"),
            max_tokens=sampling.max_tokens,
            clamp_to_context=True,
            # The sampled token's own is always there: clients send 1 for it.
            num_top=sampling.logprobs if (sampling.logprobs or 0) > 1 else 0,
            top_param="sampling_params.logprobs",
            is_streamed=self.is_streamed,
        )

    def lists(self, piece: Piece) -> dict[str, Any]:
        return {
            "token_ids": piece.token_ids.tolist(),
            "token_versions": piece.versions.tolist(),
            "content": logprob_entries(None, piece, as_ids=True),
        }

    async def whole(self, samples: Samples) -> dict[str, Any]:
        num_prompt = len(self._body.token_ids)
        return self._head | {
            "choices": [_choice(piece, lists, num_prompt) for piece, lists in await self.wholes(samples)],
            "usage": usage(num_prompt, samples),
            "prompt_logprobs": await self._prompt_logprobs(),
        }

    async def prepare(self) -> None:
        """The first event has the prompt's log-probabilities, where they were asked for."""
        scores = await self._prompt_logprobs()
        self._first = {} if scores is None else {"prompt_logprobs": scores}

    def events(self, pieces: Sequence[Piece], samples: Samples) -> bytes:
        out = []
        for piece in pieces:
            choices = {"choices": [_choice(piece, self.lists(piece), len(self._body.token_ids))]}
            out.append(event(self._head | choices | self._first))
            self._first = {}
        return b"".join(out if samples.num_left else [*out, DONE])

    async def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        body = self._body
        if body.sampling_params.prompt_logprobs is None:
            return None
        (scores,) = await score(self._state, [body.token_ids], body.model or body.sampling_params.model)
        pairs = zip(body.token_ids[1:], finite(scores)[1:], strict=True)
        return [None, *({str(token_id): {"logprob": logprob}} for token_id, logprob in pairs)]


def _choice(piece: Piece, lists: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    return {
        "index": piece.index,
        "token_ids": lists["token_ids"],
        "token_versions": lists["token_versions"],
        "logprobs": {"content": lists["content"]},
        "finish_reason": finish_reason(piece.completion),
        "routed_experts": _experts(piece.completion, num_prompt),
    }


def _experts(completion: Completion | None, num_prompt: int) -> Any:
    """[T, L, K] as raw int16 in base64, or null where the engine does not record routing.

    Engines report the completion's rows, or the prompt's before them: `start` says where the first row belongs.
    verifiers cuts the text out of the answer before it is parsed as JSON, and finds it by `data` standing first.
    """
    if completion is None or completion.routed_experts is None:
        return None
    experts = np.ascontiguousarray(completion.routed_experts, dtype=np.int16)
    return {
        "data": base64.b64encode(experts.tobytes()).decode(),
        "shape": list(experts.shape),
        "dtype": "int16",
        "start": num_prompt if len(experts) == len(completion.token_ids) else 0,
    }
