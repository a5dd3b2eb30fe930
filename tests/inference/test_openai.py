"""The openai adapter against rill's own server, and against endpoints that know less."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from rill.errors import ConfigError, EngineError, PeerDiedError, RequestError, UnsupportedError
from rill.inference.base import Delta, Feature, MemoryLevel, PauseMode, Request
from rill.inference.openai import OpenAIEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.fake_engine import LOGPROB, FakeEngine
from tests.inference.waiting import eventually


@pytest.fixture(scope="module")
def backend() -> Iterator[FakeEngine]:
    engine = FakeEngine(FakeEngine.Config(step_s=0.005))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(backend: FakeEngine) -> Iterator[OpenAIEngine]:
    config = ServerConfig(port=0, model_name="tiny")
    with BackgroundServer(create_app(backend, backend.tokenizer, config), config) as server:  # type: ignore[arg-type]
        engine = OpenAIEngine(OpenAIEngine.Config(url=server.url + "/v1", model="tiny"))
        yield engine
        engine.close()


def request(name: str, **sampling: Any) -> Request:
    sampling = {"max_new_tokens": 20, "seed": 5, **sampling}
    return Request(id=name, token_ids=np.array([40, 41, 42], np.int32), sampling=SamplingParams(**sampling))


def test_tokens_logprobs_and_versions_arrive_exactly(engine: OpenAIEngine, backend: FakeEngine) -> None:
    (expected,) = backend.generate([request("a")])
    (completion,) = engine.generate([request("a")], 20.0)
    assert completion.token_ids.tolist() == expected.token_ids.tolist()
    assert completion.logprobs.tolist() == [LOGPROB] * 20
    assert completion.versions.tolist() == [int(backend.version)] * 20
    assert completion.stop_reason is StopReason.LENGTH and engine.max_context == 512


def test_every_sampling_field_reaches_the_engine(engine: OpenAIEngine, backend: FakeEngine) -> None:
    sampling = SamplingParams(
        max_new_tokens=3, min_new_tokens=1, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, stop=("zz",), stop_token_ids=(9,), ignore_eos=True,
        logit_bias={41: 1.5}, seed=11,
    )  # fmt: skip
    ids = np.array([40], np.int32)
    engine.generate([Request(id="all", token_ids=ids, sampling=sampling, cache_salt="s", priority=2)], 20.0)
    seen = backend.seen[-1]
    assert seen.sampling == sampling and seen.cache_salt == "s" and seen.priority == 2


def test_stop_reasons_are_told_apart(engine: OpenAIEngine, backend: FakeEngine) -> None:
    (plain,) = backend.generate([request("p")])
    by_id, by_text = engine.generate(
        [
            request("id", stop_token_ids=(int(plain.token_ids[4]),)),
            request("text", stop=(backend.tokenizer.decode([int(plain.token_ids[6])]),)),
        ],
        20.0,
    )
    assert by_id.stop_reason is StopReason.STOP and by_id.stop_text is None
    assert by_text.stop_reason is StopReason.STOP and by_text.stop_text


def test_an_interrupted_request_goes_on_from_its_tokens(engine: OpenAIEngine, backend: FakeEngine) -> None:
    (expected,) = backend.generate([request("whole", max_new_tokens=100)])
    streamed: list[int] = []

    def on_delta(delta: Delta) -> None:
        streamed.extend(delta.token_ids.tolist())

    (future,) = engine.submit([request("cut", max_new_tokens=100)], on_delta)
    while len(streamed) < 10:
        time.sleep(0.005)
    engine.pause(PauseMode.INTERRUPT, 10.0)
    before = len(streamed)
    time.sleep(0.2)
    assert len(streamed) == before < 100 and not future.done()
    engine.resume()
    completion = future.result(20)
    assert completion.token_ids.tolist() == expected.token_ids.tolist() == streamed


def test_abort_keeps_tokens_and_frees_the_server(engine: OpenAIEngine, backend: FakeEngine) -> None:
    (future,) = engine.submit([request("x", max_new_tokens=400)])
    time.sleep(0.2)
    engine.abort(["x"])
    assert future.result(5).stop_reason is StopReason.ABORTED and len(future.result().token_ids) > 0
    eventually(lambda: not backend.stats().num_running, 5.0, "the server still generates for nobody")


def test_refusals_name_what_is_missing(engine: OpenAIEngine) -> None:
    assert engine.features == {Feature.STREAM, Feature.PARTIAL_ROLLOUT}
    with pytest.raises(UnsupportedError, match="update_weights"):
        engine.update_weights([], PolicyVersion(1))
    with pytest.raises(UnsupportedError, match="score"):
        engine.score([np.array([1, 2], np.int32)])
    with pytest.raises(UnsupportedError, match="release_memory"):
        engine.release(MemoryLevel.KV)


def test_malformed_requests_are_refused(engine: OpenAIEngine) -> None:
    with pytest.raises(RequestError):
        engine.submit([request("long", max_new_tokens=10**6)])
    with pytest.raises(RequestError):
        engine.generate([Request(id="bad", token_ids=np.array([10**6], np.int32))], 20.0)
    assert engine.stats().num_running == 0


def test_an_endpoint_that_is_gone_is_a_dead_peer() -> None:
    config = OpenAIEngine.Config(url="http://127.0.0.1:9", model="m", max_context=100)
    engine = OpenAIEngine(config)
    with pytest.raises(PeerDiedError):
        engine.generate(
            [Request(id="a", token_ids=np.array([1], np.int32), sampling=SamplingParams(max_new_tokens=1))]
        )
    engine.close()


def plain_endpoint(http: httpx.Request) -> httpx.Response:
    """Knows text only, and refuses keys it does not know, as OpenAI does."""
    if http.url.path.endswith("/models"):
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    body = json.loads(http.content)
    allowed = {
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "logprobs",
        "stream",
        "seed",
        "return_token_ids",
    }
    if body.keys() - allowed:
        return httpx.Response(400, json={"error": {"message": "unknown key"}})
    if body.get("stream"):
        chunk = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}  # all of it in one piece
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
    assert body["prompt"] == "ab"
    return httpx.Response(200, json={"choices": [{"index": 0, "text": "cd", "finish_reason": "stop"}]})


def test_text_mode_tokenizes_here_and_claims_no_logprobs() -> None:
    config = OpenAIEngine.Config(url="http://plain/v1", model="m", mode="text", tokenizer="chars")
    engine = OpenAIEngine(config, transport=httpx.MockTransport(plain_endpoint))
    tokenizer = FakeEngine().tokenizer
    ids = np.array(tokenizer.encode("ab"), np.int32)
    (completion,) = engine.generate([Request(id="t", token_ids=ids)], 10.0)
    assert tokenizer.decode(completion.token_ids) == "cd" and np.isnan(completion.logprobs).all()
    assert engine.features == frozenset() and engine.max_context == 32768
    engine.close()


def test_text_mode_drops_nothing_that_was_asked_for() -> None:
    asked: list[dict[str, Any]] = []

    def endpoint(http: httpx.Request) -> httpx.Response:
        asked.append({} if http.url.path.endswith("/models") else json.loads(http.content))
        return plain_endpoint(http)

    config = OpenAIEngine.Config(url="http://plain/v1", model="m", mode="text", tokenizer="chars")
    engine = OpenAIEngine(config, transport=httpx.MockTransport(endpoint))
    with pytest.raises(RequestError, match="unknown key"):
        engine.generate([request("t", stop_token_ids=(7,), ignore_eos=True, min_new_tokens=2)], 10.0)
    told = {key: asked[-1][key] for key in ("stop_token_ids", "ignore_eos", "min_tokens")}
    assert told == {"stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2}
    engine.close()


def test_a_text_with_unicodes_line_ends_is_read_as_one_event() -> None:
    text = "a\u2028b\u2029c\x85d"

    def endpoint(http: httpx.Request) -> httpx.Response:
        choice = {"index": 0, "text": text, "token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}}
        chunks = [{"choices": [choice | {"finish_reason": reason}]} for reason in (None, "stop")]
        lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks]
        answer = {"data": []} if http.url.path.endswith("/models") else None
        return httpx.Response(200, json=answer) if answer else httpx.Response(200, text="".join(lines))

    engine = OpenAIEngine(
        OpenAIEngine.Config(url="http://plain/v1", model="m"),
        transport=httpx.MockTransport(endpoint),
    )
    (completion,) = engine.generate([Request(id="t", token_ids=np.array([40], np.int32))], 10.0)
    assert completion.token_ids.tolist() == [7, 7] and completion.stop_reason is StopReason.EOS
    engine.close()


def test_an_endpoint_without_token_ids_is_found_out() -> None:
    config = OpenAIEngine.Config(url="http://plain/v1", model="m")
    engine = OpenAIEngine(config, transport=httpx.MockTransport(plain_endpoint))
    with pytest.raises(EngineError, match='mode = "text"'):
        engine.generate([Request(id="t", token_ids=np.array([40], np.int32))], 10.0)
    engine.close()
    with pytest.raises(ConfigError, match="tokenizer"):
        OpenAIEngine(OpenAIEngine.Config(url="http://plain/v1", model="m", mode="text", max_context=9))
