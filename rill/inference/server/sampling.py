"""From a client's body to engine requests: names, defaults, and every refusal that needs no engine."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from rill.inference.base import Feature, Guide, GuideKind, Request
from rill.inference.server.errors import bad_request
from rill.inference.server.schemas import GenerationBody, SamplingBody, StructuredOutputs
from rill.inference.server.state import ServerState
from rill.types import Picture, SamplingParams

_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_SEED_RANGE = 2**63
_SAME_NAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Of SamplingParams, whose defaults are OpenAI's."""

_RUN = secrets.token_hex(10)
_NUMBERS = itertools.count()


def new_id(kind: str) -> str:
    """Different from all others, of this process and of any. Random by the run, not by the request: asking the kernel
    for bytes lets go of the interpreter, and with a busy engine thread beside it comes back milliseconds later."""
    return f"{kind}-{_RUN}{next(_NUMBERS):012x}"


def _guide_of(body: SamplingBody, state: ServerState) -> Guide | None:
    """What response_format or structured_outputs asks for."""
    form = body.response_format if isinstance(body, GenerationBody) else None
    wanted, param = body.structured_outputs, "structured_outputs"
    if form is not None and form.get("type") != "text":
        if wanted is not None:
            raise bad_request("give either response_format or structured_outputs", param)
        wanted, param = _as_structured(form), "response_format"
    if wanted is None:
        return None
    kinds = {
        GuideKind.JSON_SCHEMA: {"type": "object"} if wanted.json_object else wanted.json_schema,
        GuideKind.CHOICE: wanted.choice,
        GuideKind.REGEX: wanted.regex,
        GuideKind.GRAMMAR: wanted.grammar,
    }
    found = [(kind, value) for kind, value in kinds.items() if value is not None]
    if len(found) != 1 or (wanted.json_object and wanted.json_schema is not None):
        raise bad_request(
            "structured_outputs holds one of json, regex, choice, grammar and json_object", param
        )
    state.require(Feature.GUIDED, param, "this engine has no guided decoding")
    ((kind, value),) = found
    return Guide(kind=kind, text=value if isinstance(value, str) else json.dumps(value))


def _as_structured(form: dict[str, Any]) -> StructuredOutputs:
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if form.get("type") == "json_object":
        return StructuredOutputs(json_object=True)
    if form.get("type") == "json_schema" and isinstance(schema, dict):
        return StructuredOutputs(json=schema)
    wanted = "response_format is text, json_object, or json_schema with json_schema.schema"
    raise bad_request(wanted, "response_format")


def build_requests(
    state: ServerState,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    *,
    request_id: str,
    max_tokens: int | None,
    num_top: int | None,
    top_param: str,
    is_streamed: bool,
    limit_param: str = "max_tokens",
    clamp_to_context: bool = False,
    guide: Guide | None = None,
    pictures: tuple[Picture, ...] = (),
) -> list[Request]:
    """n requests for each prompt, prompt by prompt. With a seed, sample i uses seed + i. `top_param` asks for `num_top`
    of the likeliest tokens, `limit_param` for `max_tokens`."""
    if num_top:
        what = "this engine reports the sampled token's log-probability only; use 0"
        state.require(Feature.TOP_LOGPROBS, top_param, f"{top_param} is {num_top}: {what}")
        if num_top > (most_top := state.engine.vocab_size or num_top):
            raise bad_request(
                f"{top_param} is {num_top}, and the vocabulary has {most_top} tokens", top_param
            )
    adapter = state.adapter_of(body.model)
    guide = guide or _guide_of(body, state)
    num_samples, most = body.n, state.config.max_samples
    if num_samples * len(prompts) > most:
        raise bad_request(f"{len(prompts)} prompts × n={num_samples} is more than {most} samples", "n")
    interval_s = state.generation.interval_s(is_streamed=is_streamed)
    requests = []
    for prompt_index, prompt in enumerate(prompts):
        max_new_tokens = _max_new_tokens(
            len(prompt), max_tokens, limit_param, state.engine.max_context, clamp_to_context
        )
        token_ids = np.asarray(prompt, dtype=np.int32)
        for sample in range(num_samples):
            index = prompt_index * num_samples + sample
            requests.append(
                Request(
                    id=f"{request_id}-{index}",
                    token_ids=token_ids,
                    sampling=_sampling(body, max_new_tokens, sample),
                    adapter=adapter,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority,
                    guide=guide,
                    num_top_logprobs=num_top or 0,
                    pictures=pictures,
                    delta_interval_s=interval_s,
                )
            )
    return requests


def _sampling(body: SamplingBody, max_new_tokens: int, sample: int) -> SamplingParams:
    if body.min_tokens > max_new_tokens:
        raise bad_request(f"min_tokens is {body.min_tokens}, max_tokens only {max_new_tokens}", "min_tokens")
    stops = body.stops
    if len(stops) > _MAX_STOPS or not all(0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        wanted = f"up to {_MAX_STOPS} non-empty strings of at most {_MAX_STOP_CHARS} characters"
        raise bad_request(f"stop takes {wanted}", "stop")
    bias = body.logit_bias or {}
    if wrong := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
        raise bad_request(f"logit_bias keys are token ids, got {wrong[0][:64]!r}", "logit_bias")
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        top_k=max(0, body.top_k or 0),
        stop=stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logit_bias={int(key): value for key, value in bias.items()},
        seed=None if body.seed is None else (body.seed + sample) % _SEED_RANGE,
        **given,
    )


def _max_new_tokens(prompt_length: int, wanted: int | None, param: str, max_context: int, clamp: bool) -> int:
    room = max_context - prompt_length
    if room < 1:
        raise bad_request(
            f"the prompt has {prompt_length} tokens and the context is {max_context}: there is no room to answer",
            "messages",
            "context_length_exceeded",
        )
    if wanted is None:
        return room
    if wanted < 1:
        raise bad_request(f"{param} must be at least 1", param)
    if wanted > room and not clamp:
        raise bad_request(
            f"the prompt has {prompt_length} tokens and {param} is {wanted}: together more than the context"
            f" of {max_context}",
            param,
            "context_length_exceeded",
        )
    return min(wanted, room)
