"""Grammars, penalties and the likeliest tokens in the native engine, through the whole of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from rill.errors import RequestError
from rill.inference.base import Guide, GuideKind, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.native.logit_edits import LogitEdits, SequenceEdits, apply_edits
from rill.models.loading import ModelConfig, load_model
from rill.types import SamplingParams
from tests.inference.native_models import forward_logprobs

MODEL = ModelConfig(
    shape={"model_type": "qwen2", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 64,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3,
           "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    tokenizer="chars",
)  # fmt: skip
PROMPT = np.arange(40, 52, dtype=np.int32)


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    engine = NativeEngine(NativeEngine.Config(model=MODEL, num_kv_blocks=128, dtype="float32", device="cpu"))
    yield engine
    engine.close()


def request(name: str, guide: Guide | None = None, num_top: int = 0, **sampling: float) -> Request:
    params = SamplingParams(**({"max_new_tokens": 40, "seed": 3} | sampling))  # type: ignore[arg-type]
    return Request(id=name, token_ids=PROMPT, sampling=params, guide=guide, num_top_logprobs=num_top)


def regex(text: str) -> Guide:
    return Guide(kind=GuideKind.REGEX, text=text)


def test_a_guided_answer_is_in_the_language_and_its_logprobs_are_the_models_own(engine: NativeEngine) -> None:
    pytest.importorskip("llguidance")
    model = load_model(MODEL, dtype=torch.float32, attention="eager")
    plain = [request(f"plain{i}", seed=i, max_new_tokens=12) for i in range(3)]
    alone = engine.generate(plain)
    guided = [request(f"g{i}", regex("[xy]{2,4}z"), seed=i, temperature=0.8) for i in range(4)]
    done = engine.generate([*guided, *(replace(r, id=r.id + "!") for r in plain)])
    assert engine.tokenizer is not None
    for completion in done[:4]:
        text = engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert text.strip("xy") == "z" and 3 <= len(text) <= 5 and completion.token_ids[-1] == 2
        whole = np.concatenate([PROMPT, completion.token_ids])
        expected = forward_logprobs(model, whole, 0.8)[len(PROMPT) :]
        np.testing.assert_allclose(
            completion.logprobs, expected, atol=1e-3
        )  # as if nothing had been excluded
    for before, after in zip(alone, done[4:], strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert (before.logprobs == after.logprobs).all()  # a neighbour's grammar changes no bit


def test_a_guided_answer_that_is_continued_goes_on_in_its_grammar(engine: NativeEngine) -> None:
    pytest.importorskip("llguidance")
    guide = regex("[ab]{6}c")
    (whole,) = engine.generate([request("whole", guide)])
    begun = whole.token_ids[:3]
    rest = replace(
        request("rest", guide), token_ids=np.concatenate([PROMPT, begun]), num_generated=len(begun)
    )
    assert engine.generate([rest])[0].token_ids.tolist() == whole.token_ids[3:].tolist()


def test_a_grammar_that_is_whole_ends_an_answer_that_should_have_been_longer(engine: NativeEngine) -> None:
    pytest.importorskip("llguidance")
    assert engine.tokenizer is not None
    for seed in range(4):
        whole, longer = engine.generate(
            [
                request(f"whole{seed}", regex("[xy]{2}z"), seed=seed, min_new_tokens=20),
                request(f"longer{seed}", regex("[xy]{2,9}"), seed=seed, min_new_tokens=6),
            ]
        )
        assert whole.token_ids[-1] == 2 and np.isfinite(whole.logprobs).all()
        assert engine.tokenizer.decode(whole.token_ids, skip_special_tokens=True).strip("xy") == "z"
        assert len(whole.token_ids) == 4 and 7 <= len(longer.token_ids) <= 10


def test_a_grammar_that_is_wrong_is_refused_before_anything_is_queued(engine: NativeEngine) -> None:
    pytest.importorskip("llguidance")
    for kind, text in [
        (GuideKind.REGEX, "(("),
        (GuideKind.JSON_SCHEMA, "{"),
        (GuideKind.GRAMMAR, "start: nobody"),
        (GuideKind.GRAMMAR, "root ::= ("),
        (GuideKind.GRAMMAR, ""),
        (GuideKind.CHOICE, "3"),
    ]:
        with pytest.raises(RequestError, match=kind):
            engine.submit([request("bad", Guide(kind=kind, text=text))])


def test_the_likeliest_tokens_are_those_of_the_reported_distribution(engine: NativeEngine) -> None:
    model = load_model(MODEL, dtype=torch.float32, attention="eager")
    done, other = engine.generate(
        [request("top", num_top=5, temperature=0.7, max_new_tokens=6), request("other", num_top=0)]
    )
    assert other.top is None and done.top is not None and done.top.token_ids.shape == (len(done.token_ids), 5)
    ids = torch.tensor(np.concatenate([PROMPT, done.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = (model(ids[None]).logits[0].float() / 0.7).log_softmax(-1)[len(PROMPT) - 1 : -1]
    values, tokens = logprobs.topk(5)
    assert (tokens.numpy() == done.top.token_ids).all()
    np.testing.assert_allclose(done.top.logprobs, values.numpy(), atol=1e-4)


@pytest.mark.parametrize("num_top", [-1, 105])
def test_more_likeliest_tokens_than_there_are_is_refused_and_harms_nobody(
    engine: NativeEngine, num_top: int
) -> None:
    with pytest.raises(RequestError, match="num_top_logprobs"):
        engine.submit([request("many", num_top=num_top)])
    (all_of_them,) = engine.generate([request("all", num_top=104, max_new_tokens=2)])
    assert all_of_them.top is not None and all_of_them.top.token_ids.shape == (2, 104)


def test_penalties_kept_as_they_grow_are_those_counted_from_the_beginning() -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    tokens = rng.integers(0, 300, size=20).tolist()
    grown = SequenceEdits(params, tokens, num_generated=5, end_ids=frozenset(), guide=None)
    said = tokens[-5:]
    for _ in range(40):
        new = rng.integers(0, 300, size=int(rng.integers(1, 9))).tolist()
        grown.add(new)
        tokens, said = tokens + new, said + new
    edits = LogitEdits()
    grown.collect(edits, 0, num_new=100)
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    for token in set(tokens):
        value = expected[0, token]
        expected[0, token] = value / 1.3 if value > 0 else value * 1.3
    for token, count in Counter(said).items():
        expected[0, token] -= 0.5 + 0.25 * count
    apply_edits(logits, edits)
    torch.testing.assert_close(logits, expected)
