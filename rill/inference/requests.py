"""What makes a request malformed for any engine, and how generate() waits, in one place for all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from rill.errors import RequestError, StuckError, TooLongError
from rill.inference.base import Completion, Engine, Feature, MemoryLevel, Request
from rill.types import SamplingParams, StopReason

T = TypeVar("T")

_LEAST = 1e-6
"""Of what logits are divided by. Nearer to 0 they would overflow, and the sampler has only NaN to draw from."""


_INTEGERS = (int, np.integer)
_NUMBERS = (*_INTEGERS, float, np.floating)


def _is_number(value: Any, least: float, most: float, kinds: Any = _NUMBERS) -> bool:
    """A bool is none, and NaN lies nowhere."""
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(least <= value <= most)


_is_whole = partial(_is_number, least=0, most=2**31 - 1, kinds=_INTEGERS)

_RANGES: dict[str, Callable[[Any], bool]] = {
    "sampling.max_new_tokens": partial(_is_whole, least=1),
    "sampling.min_new_tokens": _is_whole,
    "sampling.temperature": lambda v: _is_number(v, 0, 1 / _LEAST) and (v == 0 or v >= _LEAST),
    "sampling.top_k": _is_whole,
    "sampling.top_p": lambda v: _is_number(v, 0, 1) and v > 0,
    "sampling.min_p": partial(_is_number, least=0, most=1),
    "sampling.repetition_penalty": partial(_is_number, least=_LEAST, most=1 / _LEAST),
    "sampling.presence_penalty": partial(_is_number, least=-1 / _LEAST, most=1 / _LEAST),
    "sampling.frequency_penalty": partial(_is_number, least=-1 / _LEAST, most=1 / _LEAST),
    "priority": partial(_is_whole, least=-(2**31)),
    "num_top_logprobs": _is_whole,
    "num_generated": _is_whole,
}
_ranged = attrgetter(*_RANGES)


def _out_of_range(*values: object) -> str | None:
    """The first of the names in _RANGES whose value is wrong."""
    checks = zip(_RANGES.items(), values, strict=True)
    return next((name for (name, is_right), value in checks if not is_right(value)), None)


_known_out_of_range = lru_cache(maxsize=1024, typed=True)(_out_of_range)
"""Requests of one wave have the same ones."""


def are_known(requests: Sequence[Request], vocab_size: int) -> bool:
    """Whether all their token ids are of the vocabulary: one look instead of one at each, which finds who is wrong."""
    try:
        ids = np.concatenate([request.token_ids for request in requests])
    except (TypeError, ValueError):  # somebody's are no list of numbers
        return False
    return ids.size > 0 and ids.dtype.kind in "iu" and bool(ids.min() >= 0 and ids.max() < vocab_size)


def check_request(
    request: Request, engine: Engine, adapters: Collection[str] | None = None, *, is_known: bool = False
) -> None:
    """Raises RequestError where this engine cannot take it. `adapters` None, or the engine's vocabulary: unknown here,
    whoever runs the request will refuse. is_known: are_known() has looked at its tokens."""
    who, params, vocab_size = f"request {request.id}", request.sampling, engine.vocab_size
    if request.pictures and Feature.PICTURES not in engine.features:
        raise RequestError(
            f"{who} shows pictures, which this engine does not take: the native engine does, with a Qwen-VL model"
        )
    check_tokens(request, max_tokens=engine.max_context - 1, vocab_size=vocab_size, is_known=is_known)
    try:
        wrong = _known_out_of_range(*_ranged(request))
    except TypeError:  # one cannot be hashed
        wrong = _out_of_range(*_ranged(request))
    if wrong is None and not (params.seed is None or _is_number(params.seed, -(2**63), 2**64 - 1, _INTEGERS)):
        wrong = "sampling.seed"
    if wrong is not None:
        value = attrgetter(wrong)(request)
        raise RequestError(f"{who}: {wrong.removeprefix('sampling.')} cannot be {value!r}")
    if request.num_generated > len(request.token_ids):
        raise RequestError(
            f"{who}: num_generated is {request.num_generated} of {len(request.token_ids)} tokens"
        )
    if params.min_new_tokens > params.max_new_tokens:
        raise RequestError(
            f"{who}: min_new_tokens is {params.min_new_tokens}, max_new_tokens only {params.max_new_tokens}"
        )
    most = 2**31 if vocab_size is None else vocab_size
    if request.num_top_logprobs > most:
        raise RequestError(
            f"{who}: num_top_logprobs cannot be {request.num_top_logprobs}: the vocabulary has {vocab_size} tokens"
        )
    if "" in params.stop:
        raise RequestError(f"{who}: an empty stop string would match at once")
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name):
            if not _is_whole(token, most=most - 1):
                raise RequestError(
                    f"{who}: {name}: token id {token!r} is not in the vocabulary of {vocab_size}"
                )
    for token, bias in params.logit_bias.items():
        if not (_is_number(bias, -1e30, 1e30) or bias == -math.inf):
            raise RequestError(
                f"{who}: logit_bias of token {token} cannot be {bias!r}: give a number, or -inf"
            )
    check_adapter(request, adapters)


def check_adapter(request: Request, adapters: Collection[str] | None) -> None:
    if request.adapter is not None and adapters is not None and request.adapter not in adapters:
        loaded = ", ".join(sorted(adapters)) or "none"
        raise RequestError(
            f"request {request.id}: there is no adapter {request.adapter!r}: loaded are {loaded}"
        )


def check_tokens(
    request: Request, *, max_tokens: int, vocab_size: int | None, is_known: bool = False
) -> None:
    """The prompt alone: integers of the vocabulary, at least one and at most `max_tokens`."""
    ids, who = np.asarray(request.token_ids), f"request {request.id}"
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise RequestError(f"{who}: token_ids must be a non-empty list of integers")
    if not is_known and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
        raise RequestError(
            f"{who}: token ids run from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}"
        )
    if ids.size > max_tokens:
        raise TooLongError(
            f"{who}: {ids.size} tokens, and at most {max_tokens} fit here: shorten the prompt, or raise the engine's"
            " max_context or KV cache"
        )


def check_pictures(request: Request, picture_id: int) -> None:
    """Each lies behind the one before it, and nothing but placeholders (`picture_id`) lies there."""
    ids, at = np.asarray(request.token_ids), 0
    for picture in request.pictures:
        there = ids[picture.start : picture.end]
        if picture.start < at or len(there) < picture.num_tokens or np.any(there != picture_id):
            raise RequestError(
                f"request {request.id}: picture {picture.key} needs {picture.num_tokens} placeholders (token "
                f"{picture_id}) from position {picture.start} on, which are not there"
            )
        at = picture.end


def check_ids(ids: Sequence[str], under_way: Container[str]) -> None:
    """Raises RequestError where two are the same or one is in use: results are found by their ids."""
    if len(set(ids)) != len(ids) or any(request_id in under_way for request_id in ids):
        raise RequestError("two requests under way have the same id: give each its own")


def further(level: MemoryLevel, before: MemoryLevel | None) -> MemoryLevel:
    """What is released once `level` was asked for after `before`: a level includes those before it."""
    return max(level, before or level, key=list(MemoryLevel).index)


def sampling_words(params: SamplingParams) -> dict[str, Any]:
    """What vLLM and SGLang call by the names that rill has."""
    return {
        "temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty, "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids), "ignore_eos": params.ignore_eos,
    }  # fmt: skip


def stop_reason_of(reason: str, matched: object) -> StopReason:
    """From what vLLM calls `finish_reason` and `stop_reason`, as do OpenAI's routes."""
    ended = StopReason.EOS if matched is None else StopReason.STOP
    return {"length": StopReason.LENGTH, "abort": StopReason.ABORTED}.get(reason, ended)


class Generates:
    """generate(), for engines that have submit() and abort()."""

    def generate(self: Engine, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        what, ids = f"{type(self).__name__}: generate", [request.id for request in requests]
        return wait_for_all(self.submit(requests), timeout_s, what=what, abort=lambda: self.abort(ids))


def wait_for_all(
    futures: Sequence[Future[T]],
    timeout_s: float,
    *,
    what: str,
    abort: Callable[[], None],
    describe: Callable[[], str] = lambda: "",
) -> list[T]:
    """The results, in order. What is late is aborted, and StuckError says how many; `describe` adds the state. Where
    one has failed, nobody waits for the others: they are aborted too."""
    deadline = time.monotonic() + timeout_s
    try:
        return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
    except TimeoutError:
        num_left, state = sum(not f.done() for f in futures), describe()
        abort()
        message = f"{what}: {num_left} of {len(futures)} requests had not ended after {timeout_s} s"
        raise StuckError(message + (f" ({state})" if state else "")) from None
    except Exception:
        if not all(future.done() for future in futures):
            abort()
        raise
