"""Checks a request before it is queued and makes a sequence of it. Runs in the caller's thread."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rill.errors import RequestError
from rill.inference.base import Delta, Request
from rill.inference.native.detokenizer import StopMatcher, plain_decode
from rill.inference.native.guide import GuideMatcher, Guides
from rill.inference.native.logit_edits import SequenceEdits
from rill.inference.native.model_runner import ModelRunner
from rill.inference.native.sampler import hash_seed
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.inference.requests import check_adapter, check_pictures, check_request, check_tokens
from rill.models.pictures import rope_positions
from rill.types import StopReason, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rill.inference.native.engine import NativeEngine


class Admission:
    def __init__(self, engine: NativeEngine, runner: ModelRunner) -> None:
        tokenizer = engine.tokenizer
        self._engine = engine
        self._picture_id = None if runner.vision is None else runner.vision.token_id
        self._adapters = runner.adapters
        self._counter = itertools.count()
        self._eos_ids = _eos_ids(runner.model, tokenizer)
        self._eos_ends = dict.fromkeys(self._eos_ids, StopReason.EOS)
        self._decode = None if tokenizer is None else plain_decode(tokenizer)
        self._guides = None if tokenizer is None else Guides(tokenizer, self._eos_ids, engine.vocab_size)

    def sequence(
        self, request: Request, on_delta: Callable[[Delta], None] | None, is_known: bool
    ) -> Sequence:
        """is_known: are_known() has looked at its tokens."""
        params = request.sampling
        self._check(request, is_known)
        tokens = _token_array(request.token_ids)
        arrival = next(self._counter)
        ends = {} if params.ignore_eos else self._eos_ends
        if params.stop_token_ids:
            ends = dict.fromkeys(params.stop_token_ids, StopReason.STOP) | ends
        generated = tokens[len(tokens) - request.num_generated :].tolist()
        matcher = None
        if params.stop:
            assert self._decode is not None
            matcher = StopMatcher(self._decode, params.stop)
            matcher.push(generated)  # a stop string may have begun in what was generated before
        guide = self._guide(request, generated)
        edits = None
        if SequenceEdits.are_needed(params, guide):
            edits = SequenceEdits(params, tokens, num_generated=len(generated), end_ids=ends, guide=guide)
        return Sequence(
            request=request,
            seed=hash_seed(int(params.seed))
            if params.seed is not None
            else hash_seed(self._engine.config.seed, arrival + 1),
            arrival=arrival,
            on_delta=on_delta,
            stop_matcher=matcher,
            ends=ends,
            edits=edits,
            max_tokens=min(len(tokens) + params.max_new_tokens, self._engine.max_context),
            tokens=tokens,
            num_prompt=len(tokens),
            rope=rope_positions(len(tokens), request.pictures) if request.pictures else None,
        )

    def scored_sequence(
        self,
        token_ids: TokenIds,
        temperature: float = 1.0,
        adapter: str | None = None,
        *,
        is_embedding: bool = False,
    ) -> ScoredSequence:
        arrival = next(self._counter)
        request = Request(id=f"<score {arrival}>", token_ids=np.asarray(token_ids), adapter=adapter)
        check_tokens(request, max_tokens=self._engine.max_context, vocab_size=self._engine.vocab_size)
        check_adapter(request, self._adapters.names)
        if not (math.isfinite(temperature) and temperature >= 0):
            raise RequestError(f"score: temperature {temperature} is not a number of 0 or more")
        tokens = _token_array(request.token_ids)
        return ScoredSequence(
            request=request,
            seed=0,
            arrival=arrival,
            tokens=tokens,
            num_prompt=len(tokens),
            max_tokens=len(tokens) + 1,
            temperature=temperature,
            is_embedding=is_embedding,
            scores=np.zeros(len(tokens), dtype=np.float32),
        )

    def _guide(self, request: Request, generated: list[int]) -> GuideMatcher | None:
        if request.guide is None:
            return None
        if self._guides is None:
            raise RequestError(f"request {request.id}: a grammar needs a tokenizer, and this engine has none")
        matcher = self._guides.matcher(request.guide, f"request {request.id}")
        matcher.add(generated)
        return matcher

    def _check(self, request: Request, is_known: bool) -> None:
        check_request(request, self._engine, self._adapters.names, is_known=is_known)
        if self._picture_id is not None:
            check_pictures(request, self._picture_id)
        if request.sampling.stop and self._decode is None:
            raise RequestError(
                f"request {request.id}: stop strings need a tokenizer, and this engine was given none"
            )


def _token_array(token_ids: TokenIds) -> array[int]:
    return array("i", np.asarray(token_ids, dtype=np.int32).tobytes())


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that either the generation config, the model config or the tokenizer calls end of sequence."""
    found: set[int] = set()
    generation = model.generation_config
    for value in (
        model.config.get_text_config().to_dict().get("eos_token_id"),
        generation.eos_token_id if generation is not None else None,
        tokenizer.eos_token_id if tokenizer is not None else None,
    ):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(v) for v in value)
    return frozenset(found)
