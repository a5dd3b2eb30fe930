"""Drafts change how many steps an answer takes, and nothing of the answer."""

from __future__ import annotations

from array import array
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rill.inference.base import Delta, PauseMode, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.native.sequence import Sequence
from rill.inference.native.speculation import FIRST_LENGTH, FIRST_PAUSE, Speculator
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.integrity import checked_every_step
from tests.inference.native_models import SHAPES, Oracle, prompts, reference, request


@pytest.fixture
def repetitive() -> Any:
    """A model that soon says the same again: its layers see the context, but the last token weighs most."""
    model = reference("llama")
    for name, parameter in model.named_parameters():
        parameter.data.mul_(0.002 if "o_proj" in name else 8.0 if "lm_head" in name else 1.0)
    return model


def engine_of(model: Any, **options: Any) -> NativeEngine:
    options = {"num_kv_blocks": 64, "max_num_seqs": 16} | options
    config = NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), device="cpu", **options)
    return checked_every_step(NativeEngine(config, model=model))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_repetitive_text_takes_fewer_steps_and_has_the_same_tokens(
    repetitive: Any, batch_invariant: bool
) -> None:
    """Greedy and seeded; with batch invariance the log-probabilities are the same bits."""
    plain = engine_of(repetitive, batch_invariant=batch_invariant)
    drafting = engine_of(repetitive, batch_invariant=batch_invariant, num_speculative_tokens=7)
    try:
        batch = [
            request(i, p, max_new_tokens=100, temperature=t, top_p=0.9, seed=i)
            for i, (p, t) in enumerate(zip(prompts((5, 16, 33)), (0.0, 0.2, 0.5), strict=True))
        ]
        expected, found = plain.generate(batch, timeout_s=60), drafting.generate(batch, timeout_s=60)
        for one, other in zip(expected, found, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            if batch_invariant:
                assert one.logprobs.tolist() == other.logprobs.tolist()
        for asked, done in zip(batch, found, strict=True):
            whole = np.concatenate([asked.token_ids, done.token_ids])
            scores = plain.score([whole], asked.sampling.temperature, timeout_s=60)[0][len(asked.token_ids) :]
            np.testing.assert_allclose(done.logprobs, scores, atol=1e-4)
        stats = drafting.stats()
        assert 50 < stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.extra["num_steps"] < 0.8 * plain.stats().extra["num_steps"]
        assert stats.num_generated_tokens == 300 and stats.num_free_kv_blocks == stats.num_kv_blocks
    finally:
        plain.close()
        drafting.close()


def test_an_end_inside_a_draft_that_comes_true_is_the_end(repetitive: Any) -> None:
    engine = engine_of(repetitive, num_speculative_tokens=7)
    (prompt,) = prompts((9,))
    try:
        free = engine.generate([request(0, prompt, max_new_tokens=80)], timeout_s=60)[0].token_ids.tolist()
        for length in (61, 62, 63, 64):
            done = engine.generate([request(0, prompt, max_new_tokens=length)], timeout_s=60)[0]
            assert done.token_ids.tolist() == free[:length] and done.stop_reason is StopReason.LENGTH
        last = free[:60].index(free[59])
        done = engine.generate([request(0, prompt, max_new_tokens=80, stop_token_ids=(free[59],))])[0]
        assert done.token_ids.tolist() == free[: last + 1] and done.stop_reason is StopReason.STOP
        again = np.concatenate([prompt, np.array(free[:61], dtype=np.int32)])
        following = engine.generate([request(1, again, max_new_tokens=8)], timeout_s=60)[0]
        assert following.num_cached_tokens >= 48  # what was published is what was said
        assert following.token_ids.tolist() == free[61:69]
        assert engine.stats().num_accepted_tokens > 100
    finally:
        engine.close()


def test_tokens_are_distributed_as_the_model_says_whatever_was_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pearson's statistic of the second and third token, after temperature and top-k, under drafts of the likeliest."""
    vocab, num_samples = 7, 960
    Oracle.install(monkeypatch, num_rows=64)
    shape = SHAPES["llama"] | {"vocab_size": vocab, "initializer_range": 0.15}
    config = NativeEngine.Config(
        model=ModelConfig(shape=shape), device="cpu", num_kv_blocks=64, max_num_seqs=64, num_speculative_tokens=3
    )  # fmt: skip
    engine = NativeEngine(config)
    prompt = [3, 4, 5, 6]
    sampling = SamplingParams(max_new_tokens=4, temperature=0.8, top_k=4, ignore_eos=True)
    pairs: Counter[tuple[int, int]] = Counter()
    try:
        first_V = kept_probabilities(engine, [prompt])[0]
        second_VV = kept_probabilities(engine, [[*prompt, a] for a in range(vocab)])
        contexts = [[*prompt, a, b] for a in range(vocab) for b in range(vocab)]
        third_VVV = kept_probabilities(engine, contexts).reshape(vocab, vocab, vocab)
        likely = [
            0,
            int((first_V @ second_VV).argmax()),
            int((first_V @ second_VV @ third_VVV[0]).argmax()),
            0,
        ]
        for start in range(0, num_samples, 16):
            ids = [str(start + i) for i in range(16)]
            Oracle.answers |= dict.fromkeys(ids, likely)
            batch = [Request(id=i, token_ids=np.array(prompt, np.int32), sampling=sampling) for i in ids]
            done = engine.generate(batch, timeout_s=60)
            pairs.update((int(c.token_ids[1]), int(c.token_ids[2])) for c in done)
        stats = engine.stats()
        assert stats.num_draft_tokens > num_samples
        assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    finally:
        engine.close()
    expected = num_samples * np.einsum("a,ab,abc->bc", first_V, second_VV, third_VVV)
    found = np.array([[pairs[b, c] for c in range(vocab)] for b in range(vocab)], dtype=np.float64)
    assert (found[expected == 0] == 0).all()
    is_rare = expected < 5  # counted with another kind
    kinds, counts = expected[~is_rare], found[~is_rare]
    kinds[0] += expected[is_rare].sum()
    counts[0] += found[is_rare].sum()
    degrees = len(kinds) - 1
    statistic = float(((counts - kinds) ** 2 / kinds).sum())
    # Exceeded once in a thousand times (Wilson and Hilferty's approximation of chi-square).
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def kept_probabilities(engine: NativeEngine, texts: list[list[int]]) -> Any:
    """Of the token after each text, at temperature 0.8 and with the four likeliest alone."""
    vocab = engine.vocab_size
    each = [np.array([*text, token], np.int32) for text in texts for token in range(vocab)]
    scores = np.array([s[-1] for s in engine.score(each, 0.8, timeout_s=60)], np.float64).reshape(-1, vocab)
    scores[scores < np.sort(scores)[:, -4:-3]] = -np.inf
    return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


def test_deltas_and_versions_of_drafted_tokens_are_right_across_an_update(repetitive: Any) -> None:
    """An update in the middle: tokens before it are of the old version, tokens after it of the new."""
    engine = engine_of(repetitive, num_speculative_tokens=7)
    deltas: list[Delta] = []
    updated: list[Future[None]] = []

    def on_delta(delta: Delta) -> None:
        deltas.append(delta)
        if sum(len(d.token_ids) for d in deltas) > 60 and not updated:
            updated.append(Future())
            engine._commands.post("pause", lambda: engine._core.set_pause(PauseMode.INTERRUPT))

    (prompt,) = prompts((9,))
    try:
        (future,) = engine.submit([request(0, prompt, max_new_tokens=120)], on_delta)
        while not updated:
            assert not future.done()
            engine.flush()
        weights = [
            (name, p.data * (1.05 if "mlp" in name else 1.0)) for name, p in repetitive.named_parameters()
        ]
        old = {name: p.data.clone() for name, p in repetitive.named_parameters()}
        engine.update_weights(weights, PolicyVersion(1))
        engine.resume()
        done = future.result(timeout=60)
        assert np.concatenate([d.token_ids for d in deltas]).tolist() == done.token_ids.tolist()
        assert np.concatenate([d.logprobs for d in deltas]).tolist() == done.logprobs.tolist()
        assert np.concatenate([d.versions for d in deltas]).tolist() == done.versions.tolist()
        assert max(len(d.token_ids) for d in deltas) > 4
        assert (np.diff(done.versions) >= 0).all() and set(done.versions.tolist()) == {0, 1}
        whole = np.concatenate([prompt, done.token_ids])
        is_new = done.versions == 1
        np.testing.assert_allclose(done.logprobs[is_new], engine.score([whole])[0][9:][is_new], atol=1e-4)
        engine.update_weights(old.items(), PolicyVersion(2))
        np.testing.assert_allclose(done.logprobs[~is_new], engine.score([whole])[0][9:][~is_new], atol=1e-4)
    finally:
        engine.close()


def test_requests_that_read_their_own_history_are_not_drafted_for(repetitive: Any) -> None:
    plain, drafting = engine_of(repetitive), engine_of(repetitive, num_speculative_tokens=7)
    (prompt,) = prompts((9,))
    try:
        asked = request(0, prompt, max_new_tokens=60, repetition_penalty=1.1)
        assert (
            drafting.generate([asked])[0].token_ids.tolist() == plain.generate([asked])[0].token_ids.tolist()
        )
        assert drafting.stats().num_draft_tokens == 0
    finally:
        plain.close()
        drafting.close()


# --- what is drafted -----------------------------------------------------------------------------------------


def sequence(name: str, prompt: list[int], *said: int, salt: str = "") -> Sequence:
    asked = Request(id=name, token_ids=np.array(prompt, dtype=np.int32), cache_salt=salt)
    tokens = array("i", [*prompt, *said])
    return Sequence(
        request=asked, seed=0, arrival=0, future=Future(), max_tokens=100, tokens=tokens, num_prompt=len(prompt)
    )  # fmt: skip


def test_what_followed_the_last_tokens_before_is_drafted() -> None:
    speculator = Speculator(num_tokens=8, num_rows=16)
    seq = sequence("a", [1, 2, 3, 4, 5], 6, 7, 1, 2, 3)
    speculator.add(seq)
    assert speculator.propose([seq]) == [[4, 5, 6, 7]]  # so many at first
    speculator.learn(seq, 4, 4)
    seq.tokens.extend([4, 5, 6, 7, 9, 2, 3, 4])
    # Where it stood last, and twice as many: at the end of the text it would begin again.
    assert speculator.propose([seq]) == [[5, 6, 7, 9, 2, 3, 4, 5]]
    seq.max_tokens = len(seq.tokens) + 3
    assert speculator.propose([seq]) == [[5, 6]]  # the step samples one more
    seq.tokens.append(50)
    assert speculator.propose([seq]) is None


def test_other_answers_to_a_prompt_are_read_also_after_their_end_and_not_across_salts() -> None:
    speculator = Speculator(num_tokens=4, num_rows=16)
    prompt = [1, 2, 3, 4]
    ended, other = sequence("a", prompt, 20, 21, 22, 23, 24), sequence("b", prompt, 20, 21, 22)
    alien = sequence("c", prompt, 20, 21, 22, salt="mine")
    for seq in (ended, other, alien):
        speculator.add(seq)
    speculator.drop(ended)
    assert speculator.propose([other]) == [[23, 24]]
    assert speculator.propose([alien]) is None
    speculator.drop(other)
    assert list(speculator._groups) == [((1, 2, 3, 4), None, "mine")]  # nobody is left who could read them


def test_drafts_that_fail_are_made_less_often_and_many_sequences_have_none() -> None:
    speculator = Speculator(num_tokens=8, num_rows=16)
    seq = sequence("a", [1, 2, 3] * 8)
    speculator.add(seq)
    assert speculator.propose([seq] * 8) is not None
    assert speculator.propose([seq] * 9) is None
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE):
        found = speculator.propose([seq])
        assert found is not None and len(found[0]) == FIRST_LENGTH
        speculator.learn(seq, FIRST_LENGTH, 0)
        for _ in range(pause):
            assert speculator.propose([seq]) is None
            seq.tokens.append((seq.tokens[-1] % 3) + 1)
    speculator.learn(seq, FIRST_LENGTH, 1)
    assert len((speculator.propose([seq]) or [[]])[0]) == 2
    idle = sequence("b", [50, 60, 70])
    speculator.add(idle)
    assert speculator.propose([seq, idle, idle, idle]) is None  # two tokens for four are not worth a step
