"""What NativeEngine promises about requests, time and weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import EngineDiedError, EngineError, RequestError, StuckError, WeightSyncError
from rill.inference.base import Delta, MemoryLevel, PauseMode, Request
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig
from rill.models.tokenizer import build_char_tokenizer
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.native_models import (
    SHAPES,
    VOCAB,
    check_weights_that_are_not_numbers,
    forward_logprobs,
    greedy_tokens,
    make_engine,
    new_weights,
    prompts,
    reference,
    request,
)


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    engine = make_engine()
    yield engine
    engine.close()


def test_siblings_of_a_group_prefill_their_prompt_once(engine: NativeEngine) -> None:
    (prompt,) = prompts((96,))  # three steps of 32 tokens
    done = engine.generate([request(i, prompt, max_new_tokens=2) for i in range(6)])
    assert len({tuple(c.token_ids) for c in done}) == 1
    computed = 6 * 96 - sum(c.num_cached_tokens for c in done)
    assert computed == 96 + 5  # a sibling computes the last token only, for its logits


def test_siblings_with_a_partial_last_block_recompute_less_than_a_block(engine: NativeEngine) -> None:
    (prompt,) = prompts((90,))
    done = engine.generate([request(i, prompt, max_new_tokens=2) for i in range(6)])
    assert len({tuple(c.token_ids) for c in done}) == 1
    assert 6 * 90 - sum(c.num_cached_tokens for c in done) == 90 + 5 * 10


def test_a_cached_prefix_does_not_cross_salts(engine: NativeEngine) -> None:
    (prompt,) = prompts((64,))
    first = Request(id="a", token_ids=prompt, cache_salt="x", sampling=SamplingParams(max_new_tokens=1))
    engine.generate([first])
    other = Request(id="b", token_ids=prompt, cache_salt="y", sampling=SamplingParams(max_new_tokens=1))
    same = Request(id="c", token_ids=prompt, cache_salt="x", sampling=SamplingParams(max_new_tokens=1))
    assert [c.num_cached_tokens for c in engine.generate([other, same])] == [0, 63]


def test_a_second_turn_reuses_the_first_turns_tokens(engine: NativeEngine) -> None:
    (prompt,) = prompts((20,))
    answer = engine.generate([request(0, prompt, max_new_tokens=30)])[0]
    again = np.concatenate([prompt, answer.token_ids, prompt[:5]])
    assert engine.generate([request(1, again)])[0].num_cached_tokens == 48


def test_memory_pressure_preempts_and_changes_no_token() -> None:
    inputs = prompts((30, 31, 32, 33, 34))
    roomy, tight = make_engine(num_kv_blocks=200), make_engine(num_kv_blocks=12, enable_prefix_cache=False)
    try:
        batch = [request(i, p, max_new_tokens=60, temperature=1.0, seed=i) for i, p in enumerate(inputs)]
        expected = [c.token_ids.tolist() for c in roomy.generate(batch)]
        assert [c.token_ids.tolist() for c in tight.generate(batch)] == expected
        assert tight.stats().num_preempted > 0
    finally:
        roomy.close()
        tight.close()


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_company(engine: NativeEngine) -> None:
    inputs = prompts((3, 17, 40, 8, 25))
    sampling = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 20}
    together = engine.generate([request(i, p, seed=i, **sampling) for i, p in enumerate(inputs)])
    for i, prompt in enumerate(inputs):
        alone = engine.generate([request(i, prompt, seed=i, **sampling)])[0]
        assert alone.token_ids.tolist() == together[i].token_ids.tolist()


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed() -> None:
    (prompt,) = prompts((8,))
    runs = []
    for _ in range(2):
        engine = make_engine(seed=5)
        done = engine.generate([request(i, prompt, temperature=1.0) for i in range(4)])
        runs.append([c.token_ids.tolist() for c in done])
        engine.close()
    assert runs[0] == runs[1]
    assert len({tuple(t) for t in runs[0]}) == 4


def test_logprobs_are_after_the_temperature_and_before_truncation(engine: NativeEngine) -> None:
    (prompt,) = prompts((9,))
    done = engine.generate([request(0, prompt, temperature=0.6, top_k=3, top_p=0.7, seed=1)])[0]
    whole = np.concatenate([prompt, done.token_ids])
    expected = forward_logprobs(reference(), whole, temperature=0.6)[len(prompt) :]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


def test_eos_stop_ids_length_and_min_new_tokens_end_a_request(engine: NativeEngine) -> None:
    (prompt,) = prompts((6,))
    third = greedy_tokens(reference(), prompt, 12)[2]
    stopped = engine.generate([request(0, prompt, stop_token_ids=(third,))])[0]
    assert stopped.stop_reason is StopReason.STOP and stopped.token_ids[-1] == third
    assert len(stopped.token_ids) <= 3
    later = engine.generate([request(0, prompt, stop_token_ids=(third,), min_new_tokens=8)])[0]
    assert len(later.token_ids) >= 8 and third not in later.token_ids[:8]
    forced = engine.generate([request(0, prompt, ignore_eos=False, logit_bias={2: 1e4})])[0]
    assert forced.stop_reason is StopReason.EOS and forced.token_ids.tolist() == [2]
    assert engine.generate([request(0, prompt)])[0].stop_reason is StopReason.LENGTH


def test_a_stop_string_that_spans_tokens_ends_a_request() -> None:
    tokenizer = build_char_tokenizer()
    shape = SHAPES["llama"] | {"vocab_size": len(tokenizer)}
    config = NativeEngine.Config(
        model=ModelConfig(shape=shape, tokenizer="chars"), num_kv_blocks=32, max_num_seqs=2
    )
    engine = NativeEngine(config)
    try:
        prompt = np.array(tokenizer.encode("hello"), dtype=np.int32)
        free = engine.generate([request(0, prompt, max_new_tokens=30)])[0]
        text = tokenizer.decode(free.token_ids)
        stop = text[4:7]
        done = engine.generate([request(0, prompt, max_new_tokens=30, stop=("never-in-it", stop))])[0]
        assert done.stop_reason is StopReason.STOP and done.stop_text == stop
        found = tokenizer.decode(done.token_ids)
        assert text.startswith(found) and stop in found
        assert stop not in tokenizer.decode(done.token_ids[:-1])
    finally:
        engine.close()


def test_deltas_add_up_to_the_completion(engine: NativeEngine) -> None:
    inputs = prompts((5, 9))
    deltas: dict[str, list[Delta]] = {"0": [], "1": []}
    futures = engine.submit(
        [request(i, p) for i, p in enumerate(inputs)], lambda d: deltas[d.request_id].append(d)
    )
    for future in futures:
        done = future.result(timeout=60)
        parts = deltas[done.request_id]
        assert np.concatenate([d.token_ids for d in parts]).tolist() == done.token_ids.tolist()
        assert np.concatenate([d.logprobs for d in parts]).tolist() == done.logprobs.tolist()
        assert [d.stop_reason for d in parts] == [None] * (len(parts) - 1) + [done.stop_reason]
        assert len(parts) == 12


def test_a_paused_request_keeps_its_tokens_and_continues_under_new_weights(engine: NativeEngine) -> None:
    (prompt,) = prompts((20,))
    reached = threading.Event()
    seen: list[int] = []

    def on_delta(delta: Delta) -> None:
        seen.extend(delta.token_ids.tolist())
        if len(seen) >= 5:
            reached.set()

    (future,) = engine.submit([request(0, prompt, max_new_tokens=100)], on_delta)
    assert reached.wait(30)
    engine.pause(PauseMode.INTERRUPT)
    kept = list(seen)
    time.sleep(0.05)
    assert seen == kept and not future.done()
    engine.update_weights(new_weights(1.5), PolicyVersion(3))
    engine.resume()
    done = future.result(timeout=60)
    assert done.token_ids[: len(kept)].tolist() == kept
    assert done.versions.tolist() == [0] * len(kept) + [3] * (100 - len(kept))
    changed = reference()
    for parameter in changed.parameters():
        parameter.data.mul_(1.5)
    whole = np.concatenate([prompt, done.token_ids])
    start = len(prompt) + len(kept)
    assert done.token_ids[len(kept) :].tolist() == greedy_tokens(changed, whole[:start], len(whole) - start)
    np.testing.assert_allclose(
        done.logprobs[len(kept) :], forward_logprobs(changed, whole)[start:], atol=1e-4
    )


def test_no_cache_entry_outlives_its_weights(engine: NativeEngine) -> None:
    (prompt,) = prompts((64,))
    engine.generate([request(0, prompt)])
    engine.update_weights(new_weights(1.5), PolicyVersion(1))
    after = engine.generate([request(1, prompt)])[0]
    assert after.num_cached_tokens == 0 and set(after.versions.tolist()) == {1}
    changed = reference()
    for parameter in changed.parameters():
        parameter.data.mul_(1.5)
    assert after.token_ids.tolist() == greedy_tokens(changed, prompt, 12)


def test_pause_finish_lets_requests_end_and_holds_new_ones(engine: NativeEngine) -> None:
    first, second = prompts((10, 11))
    (running,) = engine.submit([request(0, first, max_new_tokens=60)])
    while engine.stats().num_running == 0 and not running.done():
        time.sleep(0.001)
    engine.pause(PauseMode.FINISH, timeout_s=60)
    assert running.done() or running.result(timeout=1)
    (held,) = engine.submit([request(1, second)])
    time.sleep(0.05)
    assert not held.done()
    engine.resume()
    assert held.result(timeout=60).stop_reason is StopReason.LENGTH


def test_pause_finish_does_not_wait_for_texts_that_are_scored(engine: NativeEngine) -> None:
    texts = prompts((100,)) * 3000
    with ThreadPoolExecutor(1) as other:
        scores = other.submit(engine.score, texts)
        try:
            while engine.stats().num_waiting == 0:
                time.sleep(0.001)
            engine.pause(PauseMode.FINISH, timeout_s=60)
            assert not scores.done()
            engine.release(MemoryLevel.KV)
            engine.restore()
            assert not scores.done()
        finally:
            engine.close()
        assert isinstance(scores.exception(60), EngineError)


@pytest.mark.parametrize("level", list(MemoryLevel))
def test_released_memory_comes_back_and_requests_continue(engine: NativeEngine, level: MemoryLevel) -> None:
    (prompt,) = prompts((20,))
    started = threading.Event()
    (future,) = engine.submit([request(0, prompt, max_new_tokens=60)], lambda d: started.set())
    assert started.wait(30)
    with pytest.raises(EngineError, match="pause"):
        engine.release(level)
    engine.pause(PauseMode.INTERRUPT)
    engine.release(level)
    with pytest.raises(EngineError, match="restore"):
        engine.score([prompt])
    engine.restore()
    engine.resume()
    assert future.result(timeout=60).token_ids.tolist() == greedy_tokens(reference(), prompt, 60)


@pytest.mark.parametrize("first", list(MemoryLevel))
@pytest.mark.parametrize("second", list(MemoryLevel))
def test_memory_that_is_released_twice_is_given_back_once_and_comes_back_whole(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, first: MemoryLevel, second: MemoryLevel
) -> None:
    moves: list[str] = []
    monkeypatch.setattr(engine._runner, "offload_weights", lambda: moves.append("out"))
    monkeypatch.setattr(engine._runner, "reload_weights", lambda: moves.append("in"))
    for level in (first, second, first):
        engine.release(level)
    assert engine._core.released is max(first, second, key=list(MemoryLevel).index)
    engine.restore()
    assert moves == ([] if first is second is MemoryLevel.KV else ["out", "in"])
    (prompt,) = prompts((20,))
    assert len(engine.generate([request(0, prompt)])[0].token_ids) == 12


def test_scoring_works_while_generation_is_paused(engine: NativeEngine) -> None:
    (prompt,) = prompts((20,))
    (future,) = engine.submit([request(0, prompt, max_new_tokens=100)])
    engine.pause(PauseMode.INTERRUPT)
    np.testing.assert_allclose(engine.score([prompt])[0], forward_logprobs(reference(), prompt), atol=1e-4)
    assert not future.done()
    engine.resume()
    assert len(future.result(timeout=60).token_ids) == 100


def test_a_text_is_scored_while_a_rollout_fills_the_queue() -> None:
    engine = make_engine(max_num_seqs=2)
    (prompt,) = prompts((9,))
    try:
        asked = [request(i, prompt, max_new_tokens=20, ignore_eos=True) for i in range(20)]
        futures = engine.submit(asked)
        (scores,) = engine.score([prompt], timeout_s=60.0)
        num_done = sum(future.done() for future in futures)
        assert num_done < 10, "it waited behind those that came before it"
        np.testing.assert_allclose(scores, forward_logprobs(reference(), prompt), atol=1e-4)
        assert all(len(future.result(timeout=60).token_ids) == 20 for future in futures)
    finally:
        engine.close()


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_kv_blocks": 9}])
def test_scoring_finds_a_place_while_paused_requests_hold_them_all(limits: dict[str, int]) -> None:
    engine = make_engine(**limits)
    texts = prompts((60, 60))
    requests = [request(i, text, max_new_tokens=40) for i, text in enumerate(texts)]
    undisturbed = [c.token_ids.tolist() for c in engine.generate(requests)]
    futures = engine.submit(requests)
    while engine.stats().num_running == 0:
        time.sleep(0.001)
    engine.pause(PauseMode.INTERRUPT)
    assert [len(s) for s in engine.score([*texts, texts[0]], timeout_s=10.0)] == [60, 60, 60]
    engine.resume()
    assert [f.result(30).token_ids.tolist() for f in futures] == undisturbed
    engine.close()


def test_abort_completes_futures_with_the_tokens_so_far(engine: NativeEngine) -> None:
    inputs = prompts((5, 6, 7))
    started = threading.Event()
    futures = engine.submit(
        [request(i, p, max_new_tokens=200) for i, p in enumerate(inputs)], lambda d: started.set()
    )
    assert started.wait(30)
    engine.abort(["0"])
    assert futures[0].result(timeout=5).stop_reason is StopReason.ABORTED
    assert not futures[1].done()
    engine.abort()
    assert all(f.result(timeout=5).stop_reason is StopReason.ABORTED for f in futures)
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_an_id_that_is_named_twice_is_aborted_once_and_so_are_those_behind_it(engine: NativeEngine) -> None:
    (prompt,) = prompts((8,))
    engine.pause(PauseMode.INTERRUPT)
    futures = engine.submit([request(i, prompt) for i in range(3)])
    engine.abort(["0", "0", "nobody", "1"])
    engine.resume()
    reasons = [future.result(60).stop_reason for future in futures]
    assert reasons == [StopReason.ABORTED, StopReason.ABORTED, StopReason.LENGTH]


def test_a_timeout_names_the_engines_state_and_aborts(engine: NativeEngine) -> None:
    engine.pause(PauseMode.INTERRUPT)
    with pytest.raises(StuckError, match="1 waiting, paused"):
        engine.generate([request(0, prompts((5,))[0])], timeout_s=0.1)
    assert engine.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "lacks 1 of"),
        ("unknown", "does not have"),
        ("shape", "shape"),
    ],
)
def test_a_bad_update_makes_the_engine_unavailable_until_a_whole_one(
    engine: NativeEngine, change: str, message: str
) -> None:
    weights = new_weights(1.0)
    if change == "missing":
        weights = weights[1:]
    elif change == "unknown":
        weights = [*weights, ("model.ghost.weight", torch.zeros(1))]
    else:
        weights[0] = (weights[0][0], weights[0][1][:-1])
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights(weights, PolicyVersion(2))
    with pytest.raises(EngineError, match="update_weights"):
        engine.generate([request(0, prompts((5,))[0])])
    engine.update_weights(new_weights(1.0), PolicyVersion(3))
    assert engine.version == 3
    assert len(engine.generate([request(0, prompts((5,))[0])])[0].token_ids) == 12


def test_a_version_that_is_not_newer_is_refused_and_the_one_in_service_stays(engine: NativeEngine) -> None:
    with pytest.raises(WeightSyncError, match="versions only grow"):
        engine.update_weights(new_weights(float("nan")), PolicyVersion(0))
    assert len(engine.generate([request(0, prompts((5,))[0])])[0].token_ids) == 12


def test_tied_weights_may_come_under_one_name_or_both() -> None:
    engine = make_engine("llama-tied")
    try:
        weights = [(n, p.data * 1.2) for n, p in reference("llama-tied").named_parameters()]
        assert not any("lm_head" in name for name, _ in weights)
        engine.update_weights(weights, PolicyVersion(1))
        engine.update_weights([*weights, ("lm_head.weight", weights[0][1])], PolicyVersion(2))
        assert engine.version == 2
    finally:
        engine.close()


@pytest.mark.parametrize(
    "bad",
    [
        Request(id="a", token_ids=np.array([], dtype=np.int32)),
        Request(id="a", token_ids=np.array([VOCAB], dtype=np.int32)),
        Request(id="a", token_ids=np.array([-1], dtype=np.int32)),
        Request(id="a", token_ids=np.array([1.5])),
        Request(id="a", token_ids=np.ones(256, dtype=np.int32)),
        Request(id="a", token_ids=np.ones(3, dtype=np.int32), adapter="none"),
        Request(id="a", token_ids=np.ones(3, dtype=np.int32), sampling=SamplingParams(temperature=-1)),
        Request(id="a", token_ids=np.ones(3, dtype=np.int32), sampling=SamplingParams(top_p=0)),
        request("a", np.ones(3, dtype=np.int32), temperature=1e-40),
        request("a", np.ones(3, dtype=np.int32), repetition_penalty=1e-40),
        request("a", np.ones(3, dtype=np.int32), logit_bias={5: float("nan")}),
        request("a", np.ones(3, dtype=np.int32), logit_bias={5: float("inf")}),
        Request(id="a", token_ids=np.ones(3, dtype=np.int32), sampling=SamplingParams(max_new_tokens=0)),
        Request(id="a", token_ids=np.ones(3, dtype=np.int32), sampling=SamplingParams(stop=("x",))),
        Request(
            id="a", token_ids=np.ones(3, dtype=np.int32), sampling=SamplingParams(stop_token_ids=(VOCAB,))
        ),
    ],
)
def test_a_malformed_request_is_refused_before_anything_is_queued(engine: NativeEngine, bad: Request) -> None:
    good = request("good", prompts((5,))[0])
    with pytest.raises(RequestError):
        engine.submit([good, bad])
    assert engine.stats().num_waiting == engine.stats().num_running == 0


_NO_NUMBERS: list[Any] = [float("nan"), float("inf"), -float("inf"), True, "1", None, [1], 1j, 10**400]
_NOT_WHOLE = [*_NO_NUMBERS, 1.0, 2**31, -(2**31) - 1]


def test_numbers_that_are_none_are_refused_by_the_name_of_their_field(engine: NativeEngine) -> None:
    """Some ended the engine's thread, some were taken for others."""
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    wholes = ("max_new_tokens", "min_new_tokens", "top_k")
    sampling = [
        *((name, value) for name in floats for value in _NO_NUMBERS),
        *((name, value) for name in wholes for value in _NOT_WHOLE),
        *(("seed", value) for value in (*_NO_NUMBERS, 1.0, 2**64, -(2**63) - 1) if value is not None),
        *(("logit_bias", {5: value}) for value in _NO_NUMBERS if value != -float("inf")),
        *(("logit_bias", {token: 1.0}) for token in (True, 5.0, "5", None, 10**30, VOCAB)),
        *(("stop_token_ids", (token,)) for token in (*_NOT_WHOLE, VOCAB)),
    ]
    prompt = prompts((5,))[0]
    found = [(name, value, request("a", prompt, **{name: value})) for name, value in sampling]
    found += [
        (name, value, replace(request("a", prompt), **{name: value}))
        for name in ("priority", "num_top_logprobs", "num_generated")
        for value in _NOT_WHOLE
    ]
    engine.generate([request("good", prompt, top_k=1, min_p=1, max_new_tokens=1)])  # like True, and right
    for name, value, bad in found:
        with pytest.raises(RequestError, match=name):
            engine.submit([bad])
            pytest.fail(f"{name} = {value!r} was taken")
    numpys = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(3),
        "seed": np.int64(2**62),
        "max_new_tokens": 1,
    }
    plain = {"temperature": 0.5, "top_k": 3, "seed": 2**62, "max_new_tokens": 1}
    ours, theirs = engine.generate([request("a", prompt, **numpys), request("b", prompt, **plain)])
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()


@pytest.mark.parametrize(
    "ids",
    [[-1], [VOCAB], [], [0.5], [2**70], [True], [[1, 2]], ["a"], np.array(["2020-01-01"], dtype="M8[D]")],
    ids=str,
)
def test_the_first_request_that_is_wrong_is_named(engine: NativeEngine, ids: Any) -> None:
    wrong = [request("first", np.asarray(ids)), request("second", np.array([VOCAB], dtype=np.int32))]
    with pytest.raises(RequestError, match="request first: token"):
        engine.submit([request("good", prompts((5,))[0]), *wrong])


def test_two_requests_under_one_id_are_refused(engine: NativeEngine) -> None:
    with pytest.raises(RequestError, match="same id"):
        engine.submit([request("x", prompts((5,))[0]), request("x", prompts((6,))[0])])


def test_an_id_is_taken_until_its_request_ends(engine: NativeEngine) -> None:
    engine.pause(PauseMode.INTERRUPT)
    (future,) = engine.submit([request("x", prompts((5,))[0])])
    with pytest.raises(RequestError, match="same id"):
        engine.submit([request("x", prompts((6,))[0])])
    engine.resume()
    future.result(timeout=30)
    assert len(engine.generate([request("x", prompts((6,))[0])])[0].token_ids) == 12


def test_a_callback_that_raises_ends_neither_its_request_nor_the_engine(engine: NativeEngine) -> None:
    def broken(delta: Delta) -> None:
        raise ValueError("not mine")

    (future,) = engine.submit([request(0, prompts((5,))[0])], broken)
    assert len(future.result(timeout=30).token_ids) == 12
    assert len(engine.generate([request(1, prompts((5,))[0])])[0].token_ids) == 12


def test_close_aborts_what_runs_and_refuses_what_comes(engine: NativeEngine) -> None:
    (future,) = engine.submit([request(0, prompts((5,))[0], max_new_tokens=200)])
    engine.close()
    assert future.result(timeout=5).stop_reason in (StopReason.ABORTED, StopReason.LENGTH)
    with pytest.raises(EngineError, match="closed"):
        engine.submit([request(1, prompts((5,))[0])])
    engine.close()


def test_a_request_that_was_never_taken_ends_with_the_engine(engine: NativeEngine) -> None:
    go_on = threading.Event()
    engine._commands.post("hold", go_on.wait)
    time.sleep(0.05)
    (future,) = engine.submit([request(1, prompts((8,))[0])])
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._commands.is_closed:
        time.sleep(0.001)
    go_on.set()
    closing.join(10)
    with pytest.raises(EngineError, match="closed before submit"):
        future.result(5)


def test_a_command_that_nobody_waits_for_any_more_is_not_run(engine: NativeEngine) -> None:
    go_on, ran = threading.Event(), threading.Event()
    engine._commands.post("hold", go_on.wait)
    with pytest.raises(StuckError, match="did not take it"):
        engine._commands.call("late", ran.set, 0.05)
    go_on.set()
    engine.flush()
    assert not ran.is_set()


def test_a_dead_engine_says_what_killed_it_and_is_not_taken_for_idle(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_: object) -> None:
        raise EngineError("the device fell off")

    monkeypatch.setattr(engine._runner, "launch", launch)
    for _ in range(2):
        with pytest.raises(EngineDiedError, match="the device fell off"):
            engine.generate([request(1, prompts((8,))[0])])
    with pytest.raises(EngineDiedError, match="the device fell off"):
        engine.stats()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_fail_the_request_and_say_so(
    engine: NativeEngine, temperature: float
) -> None:
    check_weights_that_are_not_numbers(engine, temperature)


def test_a_request_that_forbids_every_token_fails_alone(engine: NativeEngine) -> None:
    (prompt,) = prompts((8,))
    bad = request(1, prompt, logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))
    futures = engine.submit([bad, request(2, prompt, max_new_tokens=3)])
    with pytest.raises(EngineError, match="forbidden by logit_bias"):
        futures[0].result(20)
    assert len(futures[1].result(20).token_ids) == 3


def test_lower_priority_numbers_run_first() -> None:
    engine = make_engine(max_num_seqs=1)
    try:
        order: list[str] = []
        batch = [
            Request(
                id=str(p), token_ids=prompts((5,))[0], priority=p, sampling=SamplingParams(max_new_tokens=3)
            )
            for p in (3, 1, 2)
        ]
        futures = engine.submit(batch, lambda d: order.append(d.request_id) if d.stop_reason else None)
        [f.result(timeout=60) for f in futures]
        assert order == ["1", "2", "3"]
    finally:
        engine.close()
