"""A second model's drafts change how many steps an answer takes, and nothing of the answer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rill.errors import ConfigError
from rill.inference.base import Completion, MemoryLevel, PauseMode, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.native.speculation import LOOKS, TRIED_LOOKS, Pace, best_length
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion
from tests.e2e.faults import foreign_tokenizer
from tests.inference.integrity import checked_every_step
from tests.inference.native_models import SHAPES, new_weights, prompts, reference, request


def engine_of(draft: ModelConfig | None, **options: Any) -> NativeEngine:
    options = {"num_kv_blocks": 64, "max_num_seqs": 16, "max_batched_tokens": 32, "device": "cpu"} | options
    if draft is not None:
        options = {"num_speculative_tokens": 4, "draft_model": draft} | options
    return checked_every_step(
        NativeEngine(NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), **options))
    )


def costs(engine: NativeEngine, cost: float) -> None:
    """A step of the draft model, in the model's; tiny ones cost the same."""
    drafting: Any = engine._core._draft_model
    drafting.cost, drafting.round_cost = cost, 0.0


def near(folder: Path, noise: float) -> ModelConfig:
    """The target's weights, and some noise."""
    model = reference("llama")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += noise * parameter.data.std() * torch.randn_like(parameter.data)
    model.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def asked() -> list[Request]:
    """Two samples of one prompt, a prompt longer than a step's budget, one of a single token."""
    inputs = [*prompts((33,)) * 2, *prompts((70, 1), seed=1)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 5}
    ]  # fmt: skip
    pairs = enumerate(zip(inputs, ways, strict=True))
    return [request(i, p, max_new_tokens=60, seed=i, **way) for i, (p, way) in pairs]


def same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    engine = engine_of(None)
    try:
        return engine.generate(asked(), timeout_s=60)
    finally:
        engine.close()


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_draft_model_that_thinks_alike_saves_steps_and_changes_no_token(
    noise: float, tmp_path: Path, expected: list[Completion]
) -> None:
    engine = engine_of(near(tmp_path, noise))
    costs(engine, 0.1)
    try:
        same(engine.generate(asked(), timeout_s=60), expected)
        stats = engine.stats()
        true = stats.num_accepted_tokens / stats.num_draft_tokens
        assert true > 0.98 if noise == 0 else 0.25 < true < 0.9
        assert stats.extra["num_steps"] < (
            30 if noise == 0 else 45
        )  # 60 tokens of each, 70 of a prompt before
        assert not engine._core._draft_model._read, "what has ended is still read along"  # type: ignore[union-attr]
    finally:
        engine.close()


def test_drafts_that_never_come_true_are_given_up_and_tried_again_later(expected: list[Completion]) -> None:
    engine = engine_of(ModelConfig(shape=SHAPES["llama"], seed=7), num_speculative_tokens=3)
    costs(engine, 0.2)
    try:
        same(engine.generate(asked(), timeout_s=60), expected)
        few = engine.stats().num_draft_tokens
        assert 0 < few < 40
        long = request("long", prompts((5,))[0], max_new_tokens=240, temperature=1.0, seed=3)
        engine.generate([long], timeout_s=60)
        engine.generate(
            [request("longer", prompts((6,))[0], max_new_tokens=240, temperature=1.0)], timeout_s=60
        )
        assert few < engine.stats().num_draft_tokens < few + 60
    finally:
        engine.close()


def test_preempted_interrupted_and_released_sequences_are_read_again(
    tmp_path: Path, expected: list[Completion]
) -> None:
    """Few blocks, so that sequences lose theirs to others; pauses, releases of all memory, and an update in between."""
    engine = engine_of(near(tmp_path, 0.02), num_kv_blocks=20)
    costs(engine, 0.1)
    try:
        futures = engine.submit(asked())
        for round_ in range(6):
            while not any(f.done() for f in futures) and engine.stats().num_generated_tokens < 25 * (
                round_ + 1
            ):
                engine.flush()
            engine.pause(PauseMode.INTERRUPT)
            engine.release(MemoryLevel.WEIGHTS)
            engine.restore()
            if round_ == 2:
                engine.update_weights(new_weights(1.0), PolicyVersion(1))
            engine.resume()
        same([future.result(timeout=60) for future in futures], expected)
        stats = engine.stats()
        assert stats.num_preempted > 4 and stats.num_accepted_tokens > 40
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
    finally:
        engine.close()


def test_a_draft_model_with_fewer_tokens_or_a_shorter_context_drafts_what_it_can(
    expected: list[Completion],
) -> None:
    small = SHAPES["llama"] | {"vocab_size": 61, "max_position_embeddings": 96, "num_hidden_layers": 1}
    engine = engine_of(ModelConfig(shape=small))
    costs(engine, 0.0)
    try:
        same(engine.generate(asked(), timeout_s=60), expected)
        assert engine.stats().num_draft_tokens > 100
    finally:
        engine.close()


def test_a_draft_model_of_another_vocabulary_or_without_drafts_is_refused(tmp_path: Path) -> None:
    shape = ModelConfig(shape=SHAPES["llama"])
    with pytest.raises(ValidationError, match="set num_speculative_tokens"):
        NativeEngine.Config(model=shape, draft_model=shape)
    chars = ModelConfig(shape=SHAPES["llama"] | {"vocab_size": 128}, tokenizer="chars")
    foreign_tokenizer(tmp_path, chars)
    for name, is_own in (("model", True), ("other", False)):
        drafting = chars.model_copy(update={"tokenizer": str(tmp_path / name)})
        config = NativeEngine.Config(
            model=chars, draft_model=drafting, num_speculative_tokens=2, device="cpu"
        )
        with nullcontext() if is_own else pytest.raises(ConfigError, match="another vocabulary .* here"):
            NativeEngine(config).close()


def test_a_draft_is_as_long_as_it_pays() -> None:
    assert best_length(0.9, 0.05, 0.1, 8) > best_length(0.9, 0.3, 0.1, 8) > 0
    assert best_length(0.9, 0.05, 0.1, 2) == 2
    assert best_length(0.7, 0.05, 3.0, 8) == best_length(0.2, 0.5, 0, 8) == best_length(0.9, 0.05, 0, 0) == 0


def test_a_clock_decides_where_drafts_are_waited_for_and_looks_again_at_what_was_slower() -> None:
    pace, now = Pace(), 100.0

    def turn(num_seqs: int, num_tokens: int, seconds: float, *, is_drafted: bool) -> None:
        nonlocal now
        now += seconds
        pace.note(num_seqs, num_tokens, now, is_drafted=is_drafted)

    def turns(num_turns: int, num_tokens: int, seconds: float, *, is_drafted: bool) -> None:
        for _ in range(num_turns):
            turn(4, num_tokens, seconds, is_drafted=is_drafted)

    def num_drafted() -> int:
        return sum(pace.is_faster(4) for _ in range(2 * LOOKS))

    turns(TRIED_LOOKS, 16, 0.020, is_drafted=False)
    assert not pace.is_faster(4)  # first, how fast it is without
    turns(1, 16, 0.020, is_drafted=False)
    assert pace.is_faster(4)
    turn(4, 4, 9.0, is_drafted=True)  # the first of them reads whole prompts
    for num_tokens in (4, 20) * 4:
        turn(4, num_tokens, 0.010, is_drafted=True)
    turn(4, 12, 3.0, is_drafted=True)  # a graph was captured
    assert num_drafted() == 2 * (LOOKS - TRIED_LOOKS)
    turns(40, 8, 0.012, is_drafted=True)
    assert num_drafted() == 2 * TRIED_LOOKS
    pace.pause()
    now += 60.0  # idle, then a prompt
    turns(40, 16, 0.036, is_drafted=False)  # it has become slower
    assert num_drafted() == 2 * (LOOKS - TRIED_LOOKS)
    assert not pace.is_faster(30)  # of which nothing is known
