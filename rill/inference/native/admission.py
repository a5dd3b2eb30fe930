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
from rill.inference.requests import check_request, check_tokens
from rill.types import TokenIds

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
        self.vocab_size = int(model.config.vocab_size)
        self._eos_ids = _eos_ids(model, tokenizer)
        self.adapters: frozenset[str] = frozenset()

    def sequence(self, request: Request, on_delta: Callable[[Delta], None] | None) -> Sequence:
        params = request.sampling
        self._check(request)
        tokens = [int(t) for t in request.token_ids]
        arrival = next(self._counter)
        eos_ids: frozenset[int] = frozenset() if params.ignore_eos else self._eos_ids
        matcher = None
        if params.stop:
            assert self._tokenizer is not None
            matcher = StopMatcher(self._tokenizer, params.stop)
            for token in tokens[len(tokens) - request.num_generated :]:
                matcher.push(token)  # a stop string may have begun in what was generated before
        return Sequence(
            request=request,
            seed=hash_seed(params.seed) if params.seed is not None else hash_seed(self._seed, arrival + 1),
            arrival=arrival,
            future=Future(),
            on_delta=on_delta,
            stop_matcher=matcher,
            eos_ids=eos_ids,
            end_ids=eos_ids.union(params.stop_token_ids),
            has_edits=has_edits(params),
            needs_history=needs_history(params),
            max_tokens=min(len(tokens) + params.max_new_tokens, self._max_context),
            tokens=tokens,
            num_prompt=len(tokens),
        )

    def scored_sequence(self, token_ids: TokenIds, temperature: float) -> ScoredSequence:
        arrival = next(self._counter)
        request = Request(id=f"<score {arrival}>", token_ids=np.asarray(token_ids))
        check_tokens(request, max_tokens=self._max_context, vocab_size=self.vocab_size)
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
        check_request(
            request, max_context=self._max_context, vocab_size=self.vocab_size, adapters=self.adapters
        )
        if request.sampling.stop and self._tokenizer is None:
            raise RequestError(
                f"request {request.id}: stop strings need a tokenizer, and this engine was given none"
            )


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
