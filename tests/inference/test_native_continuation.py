"""A request that goes on elsewhere from its tokens gives what it would have given in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rill.errors import RequestError
from rill.inference.base import Delta, Request
from rill.inference.continued import Flight
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig
from rill.models.tokenizer import build_char_tokenizer
from rill.types import SamplingParams, StopReason
from tests.inference.native_models import SHAPES, prompts


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    model = ModelConfig(
        shape=SHAPES["llama"] | {"vocab_size": len(build_char_tokenizer())}, tokenizer="chars"
    )
    engine = NativeEngine(NativeEngine.Config(model=model, device="cpu", num_kv_blocks=64, max_num_seqs=8))
    yield engine
    engine.close()


def cut(flight: Flight, done: Any, num_tokens: int) -> None:
    """As if the engine had died after so many tokens."""
    part = slice(0, num_tokens)
    flight.record(
        Delta(
            request_id=done.request_id,
            token_ids=done.token_ids[part],
            logprobs=done.logprobs[part],
            versions=done.versions[part],
        )
    )
    flight.restart()


@pytest.mark.parametrize("num_tokens", [1, 5, 11])
@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4, "min_new_tokens": 8},
        {"temperature": 0.0, "frequency_penalty": 2.0},
    ],
)
def test_penalties_count_what_was_generated_before(
    engine: NativeEngine, sampling: dict[str, Any], num_tokens: int
) -> None:
    params = SamplingParams(max_new_tokens=16, seed=3, **{"ignore_eos": True, **sampling})
    request = Request(id="whole", token_ids=np.array(prompts((9,))[0], np.int32), sampling=params)
    (whole,) = engine.generate([request])
    flight = Flight(request, None)
    cut(flight, whole, num_tokens)
    (rest,) = engine.generate([flight.next_request()])
    joined = flight.joined(rest)
    assert joined.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, atol=1e-4)


def test_a_stop_string_may_begin_before_the_break(engine: NativeEngine) -> None:
    assert engine.tokenizer is not None
    params = SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True)
    request = Request(id="free", token_ids=np.array(prompts((9,))[0], np.int32), sampling=params)
    (free,) = engine.generate([request])
    stop = engine.tokenizer.decode(free.token_ids[4:8])
    stopped = replace(request, id="stopped", sampling=replace(params, stop=(stop,)))
    (whole,) = engine.generate([stopped])
    assert whole.stop_reason is StopReason.STOP and len(whole.token_ids) <= 8
    flight = Flight(stopped, None)
    cut(flight, whole, len(whole.token_ids) - 2)
    (rest,) = engine.generate([flight.next_request()])
    assert rest.stop_reason is StopReason.STOP and rest.stop_text == stop
    assert flight.joined(rest).token_ids.tolist() == whole.token_ids.tolist()


def test_more_generated_tokens_than_tokens_are_refused(engine: NativeEngine) -> None:
    with pytest.raises(RequestError, match="num_generated"):
        engine.submit([Request(id="x", token_ids=np.array([5], np.int32), num_generated=2)])
