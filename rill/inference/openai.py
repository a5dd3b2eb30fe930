"""Any OpenAI-compatible endpoint as an Engine: rill's own server, vLLM's, or one that knows only text.

    tokens   /v1/completions with token ids and `return_token_ids` (vLLM, rill): exact ids, log-probabilities, streams,
             client-side partial rollouts; per-token versions from rill's server.
    text     any endpoint: text in, text out, tokenized here. The ids are a guess at what the model saw, and there are
             no log-probabilities (NaN): good for judging, evaluation and data, not for training on the tokens.

It lacks, in both: weight updates, memory release, scoring. Asking for one is an UnsupportedError.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import httpx
from pydantic import Field

from rill.errors import ConfigError, EngineError
from rill.inference.base import Feature, Request
from rill.inference.remote import Chunk, RemoteConfig, RemoteEngine, ServerHttp
from rill.inference.requests import sampling_words, stop_reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USUAL_CONTEXT = 32768


class OpenAIEngine(RemoteEngine):
    class Config(RemoteConfig):
        type: Literal["openai"] = "openai"
        url: str
        """The base address, with /v1 if the endpoint has it."""
        model: str
        """The model's name at the endpoint."""
        mode: Literal["tokens", "text"] = "tokens"
        """tokens: the endpoint takes and returns token ids. text: it does not; `tokenizer` is needed."""
        tokenizer: str | None = None
        """A local tokenizer folder, or "chars", for mode text. Unset: none."""
        api_key_variable: str = "OPENAI_API_KEY"
        max_context: int = Field(default=0, ge=0)
        """Tokens of prompt and answer. 0: as the endpoint's model list says, else 32768."""

    def __init__(self, config: Config, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(config, "openai", transport)
        self.config = config
        self._tokenizer = self._load_tokenizer() if config.mode == "text" else None
        self.max_context = config.max_context or self._call(
            self._ask_context(), "models", config.connect_timeout_s + 30
        )

    @property
    def features(self) -> frozenset[Feature]:
        if self.config.mode == "text":
            return frozenset()
        return frozenset({Feature.STREAM, Feature.PARTIAL_ROLLOUT})

    def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if self._tokenizer is not None:
            return self._complete_text(request, self._tokenizer)
        return completion_chunks(self._http, "/completions", request, self.config.model)

    async def _complete_text(
        self, request: Request, tokenizer: PreTrainedTokenizerBase
    ) -> AsyncGenerator[Chunk, None]:
        body = completion_body(request, self.config.model)
        for key in ("return_token_ids", "stream", "logprobs"):
            body.pop(key, None)
        body["prompt"] = tokenizer.decode(request.token_ids.tolist())
        (choice,) = (await self._http.post("/completions", body))["choices"]
        ids: list[int] = tokenizer.encode(choice["text"], add_special_tokens=False)
        reason = stop_reason_of(choice["finish_reason"], choice.get("stop_reason"))
        yield Chunk(token_ids=ids, logprobs=[math.nan] * len(ids), stop_reason=reason)

    async def _ask_context(self) -> int:
        card = await model_card(self._http, "/models", self.config.model)
        self.vocab_size = card.get("vocab_size")  # rill's server says
        return int(card.get("max_model_len") or _USUAL_CONTEXT)

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        from rill.models.loading import ModelConfig, load_tokenizer

        if self.config.tokenizer is None:
            raise ConfigError("engine openai: mode 'text' needs `tokenizer`: a local folder, or \"chars\"")
        return load_tokenizer(ModelConfig(path=self.config.tokenizer, tokenizer=self.config.tokenizer))


async def model_card(http: ServerHttp, path: str, model: str) -> dict[str, Any]:
    """What the endpoint says of this model; empty where it says nothing."""
    answer = await http.get(path)
    return next((card for card in (answer or {}).get("data", []) if card.get("id") == model), {})


async def completion_chunks(
    http: ServerHttp, path: str, request: Request, model: str
) -> AsyncGenerator[Chunk, None]:
    """The stream of one request at a completions route that tells token ids."""
    async with aclosing(http.events(path, completion_body(request, model))) as events:
        async for event in events:
            for choice in event["choices"]:
                yield _read_choice(choice)


def completion_body(request: Request, model: str) -> dict[str, Any]:
    """A request in the dialect of /v1/completions. What is off is left out: plain endpoints refuse unknown keys."""
    words, off = (_optional_words(each) for each in (request, Request(id="", token_ids=request.token_ids)))
    return {key: value for key, value in words.items() if value != off[key]} | {
        "model": request.adapter or model,
        "prompt": request.token_ids.tolist(),
        "max_tokens": request.sampling.max_new_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "logprobs": 0,
        "stream": True,
        "return_token_ids": True,
    }


def _optional_words(request: Request) -> dict[str, Any]:
    s = request.sampling
    return sampling_words(s) | {
        "top_k": s.top_k,
        "min_tokens": s.min_new_tokens,
        "logit_bias": {str(k): v for k, v in s.logit_bias.items()},
        "seed": s.seed,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
    }


def _read_choice(choice: dict[str, Any]) -> Chunk:
    """One choice of a streamed completion."""
    ids = choice.get("token_ids") or []
    reason = choice.get("finish_reason")
    if choice.get("token_ids") is None and choice.get("text"):
        raise EngineError(
            'the endpoint returns no token ids (`return_token_ids`): use mode = "text" with a tokenizer'
        )
    if reason == "error":
        raise EngineError("the endpoint ended the request with an error")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(logprobs) != len(ids):
        raise EngineError(f"the endpoint gave {len(ids)} tokens with {len(logprobs)} log-probabilities")
    matched = choice.get("stop_reason")
    return Chunk(
        token_ids=ids,
        logprobs=logprobs,
        versions=choice.get("token_versions"),
        stop_reason=None if reason is None else stop_reason_of(reason, matched),
        stop_text=matched if isinstance(matched, str) else None,
    )
