"""Checks a request before it is queued and makes a sequence of it. Runs in the caller's thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from rill.errors import RequestError
from rill.inference.base import Delta, Request
from rill.inference.native.detokenizer import StopMatcher
from rill.inference.native.sampler import has_edits, hash_seed, needs_history
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.types import SamplingParams, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Admission:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        max_context: int,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._seed = seed
        self._counter = itertools.count()
        self._vocab_size = int(model.config.vocab_size)
        self._eos_ids = _eos_ids(model, tokenizer)
        self.adapters: frozenset[str] = frozenset()

    def sequence(self, request: Request, on_delta: Callable[[Delta], None] | None) -> Sequence:
        params = request.sampling
        self._check(request)
        tokens = [int(t) for t in request.token_ids]
        arrival = next(self._counter)
        matcher = None
        if params.stop:
            assert self._tokenizer is not None
            matcher = StopMatcher(self._tokenizer, params.stop)
        return Sequence(
            request=request,
            seed=hash_seed(params.seed) if params.seed is not None else hash_seed(self._seed, arrival + 1),
            arrival=arrival,
            future=Future(),
            on_delta=on_delta,
            stop_matcher=matcher,
            stop_ids=frozenset(params.stop_token_ids),
            eos_ids=frozenset() if params.ignore_eos else self._eos_ids,
            has_edits=has_edits(params),
            needs_history=needs_history(params),
            max_tokens=min(len(tokens) + params.max_new_tokens, self._max_context),
            tokens=tokens,
            num_prompt=len(tokens),
        )

    def scored_sequence(self, token_ids: TokenIds, temperature: float) -> ScoredSequence:
        arrival = next(self._counter)
        request = Request(id=f"\0score-{arrival}", token_ids=np.asarray(token_ids))
        self._check_tokens(request, limit=self._max_context)
        if not (math.isfinite(temperature) and temperature >= 0):
            raise RequestError(f"score: temperature {temperature} is not a number of 0 or more")
        tokens = [int(t) for t in request.token_ids]
        return ScoredSequence(
            request=request,
            seed=0,
            arrival=arrival,
            future=Future(),
            tokens=tokens,
            num_prompt=len(tokens),
            max_tokens=len(tokens) + 1,
            temperature=temperature,
            scores=np.zeros(len(tokens), dtype=np.float32),
        )

    def _check(self, request: Request) -> None:
        self._check_tokens(request, limit=self._max_context - 1)
        where, params = f"request {request.id}", request.sampling
        for name, is_right in _RANGES.items():
            value = getattr(params, name)
            if not is_right(value):
                raise RequestError(f"{where}: {name} cannot be {value!r}")
        if params.stop and self._tokenizer is None:
            raise RequestError(f"{where}: stop strings need a tokenizer, and this engine was given none")
        if "" in params.stop:
            raise RequestError(f"{where}: an empty stop string would match at once")
        for token in (*params.stop_token_ids, *params.logit_bias):
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{where}: token id {token} is not in the vocabulary of {self._vocab_size}"
                )
        if request.adapter is not None and request.adapter not in self.adapters:
            loaded = ", ".join(sorted(self.adapters)) or "none"
            raise RequestError(f"{where}: there is no adapter {request.adapter!r}: loaded are {loaded}")
        if request.multimodal is not None:
            raise RequestError(f"{where}: the native engine reads text only; use vllm for images")

    def _check_tokens(self, request: Request, limit: int) -> None:
        ids = np.asarray(request.token_ids)
        where = f"request {request.id}"
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise RequestError(f"{where}: token_ids must be a non-empty list of integers")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise RequestError(
                f"{where}: token ids run from {ids.min()} to {ids.max()}, the vocabulary has {self._vocab_size}"
            )
        if ids.size > limit:
            raise RequestError(
                f"{where}: {ids.size} tokens leave no room in a context of {self._max_context}: "
                "shorten the prompt or raise max_context or the KV cache"
            )


_RANGES: dict[str, Callable[[float], bool]] = {
    "max_new_tokens": lambda v: v >= 1,
    "min_new_tokens": lambda v: v >= 0,
    "temperature": lambda v: math.isfinite(v) and v >= 0,
    "top_k": lambda v: v >= 0,
    "top_p": lambda v: 0 < v <= 1,
    "min_p": lambda v: 0 <= v <= 1,
    "repetition_penalty": lambda v: math.isfinite(v) and v > 0,
    "presence_penalty": math.isfinite,
    "frequency_penalty": math.isfinite,
}
assert all(hasattr(SamplingParams(), name) for name in _RANGES)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that either the generation config, the model config or the tokenizer calls end of sequence."""
    found: set[int] = set()
    generation = model.generation_config
    for value in (
        model.config.eos_token_id,
        generation.eos_token_id if generation is not None else None,
        tokenizer.eos_token_id if tokenizer is not None else None,
    ):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(v) for v in value)
    return frozenset(found)
