"""The official openai client, and a client of verifiers' token route, against a live server on the native engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rill.inference.base import Request
from rill.inference.native.engine import NativeEngine
from rill.inference.openai import OpenAIEngine
from rill.inference.server import ServerConfig, create_app, serve_in_thread
from rill.models.loading import ModelConfig, load_model
from rill.types import PolicyVersion, SamplingParams
from tests.inference.conformance import EngineConformance
from tests.inference.fake_engine import FakeEngine
from tests.inference.plain_http import http

openai = pytest.importorskip("openai")

MODEL = ModelConfig(
    shape={"model_type": "qwen2", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 64,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
           "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    tokenizer="chars",
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    engine = NativeEngine(NativeEngine.Config(model=MODEL, num_kv_blocks=256, dtype="float32", device="cpu"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine: NativeEngine) -> Iterator[str]:
    config = ServerConfig(port=0, model_name="tiny", api_keys=["secret"])  # type: ignore[list-item]
    assert engine.tokenizer is not None
    with serve_in_thread(create_app(engine, engine.tokenizer, config), config) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60)


def test_chat_with_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=8,
        seed=1,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == len(choice.token_ids)
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    assert choice.finish_reason in ("stop", "length") and isinstance(choice.message.content, str)


def test_a_stream_equals_the_whole_answer(client: Any) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "seed": 7}
    whole = client.chat.completions.create(**settings)
    chunks = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_greedy_answers_have_a_top_logprob_and_sampled_ones_refuse(client: Any) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "logprobs": True}
    answer = client.chat.completions.create(**settings, temperature=0, top_logprobs=1)
    entry = answer.choices[0].logprobs.content[0]
    assert entry.top_logprobs[0].token == entry.token
    with pytest.raises(openai.BadRequestError, match="sampled token"):
        client.chat.completions.create(**settings, top_logprobs=3)


def test_seed_bias_and_n_reach_the_sampler(client: Any) -> None:
    settings = {"model": "tiny", "prompt": "ab", "max_tokens": 6, "temperature": 1.0}
    first = client.completions.create(**settings, seed=3, n=3)
    again = client.completions.create(**settings, seed=3, n=3)
    other = client.completions.create(**settings, seed=4, n=1)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert other.choices[0].text == texts[1], "sample i of a seed is the first of seed + i"
    biased = client.completions.create(
        **settings, logit_bias={"50": 100}, extra_body={"return_token_ids": True}
    )
    assert set(biased.choices[0].token_ids) == {50}
    banned = client.completions.create(**settings, logit_bias={str(t): -100 for t in range(104) if t % 2})
    assert banned.usage.completion_tokens == 6


def test_a_streamed_completion_ends_with_its_usage(client: Any) -> None:
    settings = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 5, "seed": 3}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for index in range(2):
        parts = [c.text for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(parts) == whole.choices[index].text


def test_completions_lists_and_errors(client: Any, url: str) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=3, logprobs=0)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [m.id for m in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[100_000])


def test_tools_through_the_client() -> None:
    fake = FakeEngine(
        FakeEngine.Config(answer='<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    )
    config = ServerConfig(port=0, model_name="tiny")
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    ]
    with serve_in_thread(create_app(fake, fake.tokenizer, config), config) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        first = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools)
        (call,) = first.choices[0].message.tool_calls
        assert call.function.name == "add" and call.function.arguments == '{"a": 1, "b": 2}'
        history = [
            *MESSAGES,
            first.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        assert client.chat.completions.create(model="tiny", messages=history, tools=tools).choices
        names = [
            c.function.name
            for chunk in client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=tools, stream=True
            )
            for c in chunk.choices[0].delta.tool_calls or []
        ]
        assert names == ["add"]
    fake.close()


def test_the_token_route_gives_what_the_engine_gives(url: str, engine: NativeEngine) -> None:
    ids = [40, 41, 42]
    sampling = {"temperature": 0.8, "top_p": 1.0, "max_tokens": 10, "stop_token_ids": [2], "logprobs": 1, "seed": 4,
                "skip_special_tokens": False}  # fmt: skip
    headers = {"Authorization": "Bearer secret", "X-Session-ID": "rollout-1"}
    body = {"model": "tiny", "token_ids": ids, "cache_salt": "v0", "sampling_params": sampling}
    answer = http.post(f"{url}/inference/v1/generate", json=body, headers=headers, timeout=60).json()
    choice = answer["choices"][0]
    (expected,) = engine.generate(
        [
            Request(
                id="direct",
                token_ids=np.array(ids, np.int32),
                sampling=SamplingParams(temperature=0.8, max_new_tokens=10, stop_token_ids=(2,), seed=4),
            )
        ]
    )
    assert choice["token_ids"] == expected.token_ids.tolist()
    assert [e["token"] for e in choice["logprobs"]["content"]] == [
        f"token_id:{t}" for t in choice["token_ids"]
    ]
    assert np.allclose([e["logprob"] for e in choice["logprobs"]["content"]], expected.logprobs, atol=1e-5)
    assert choice["token_versions"] == [0] * len(choice["token_ids"])


def test_answers_carry_the_version_that_made_them(url: str, engine: NativeEngine) -> None:
    weights = [(name, p.detach().clone()) for name, p in engine._runner.model.named_parameters()]
    engine.update_weights(weights, PolicyVersion(engine.version + 1))
    body = {"token_ids": [40], "sampling_params": {"max_tokens": 3}}
    headers = {"Authorization": "Bearer secret"}
    choice = http.post(f"{url}/inference/v1/generate", json=body, headers=headers, timeout=60).json()[
        "choices"
    ][0]
    assert set(choice["token_versions"]) == {int(engine.version)}


class TestOpenAIOverTheServer(EngineConformance):
    """Adapter, HTTP, server and native engine together pass the suite that every engine runs."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[OpenAIEngine]:
        native = NativeEngine(
            NativeEngine.Config(model=MODEL, num_kv_blocks=256, dtype="float32", device="cpu")
        )
        config = ServerConfig(port=0, model_name="tiny")
        assert native.tokenizer is not None
        with serve_in_thread(create_app(native, native.tokenizer, config), config) as server:
            adapter = OpenAIEngine(OpenAIEngine.Config(url=f"{server.url}/v1", model="tiny"))
            yield adapter
            adapter.close()
        native.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return load_model(MODEL, dtype=torch.float32)
