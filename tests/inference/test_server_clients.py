"""The official openai client, and a client of verifiers' token route, against a live server on the native engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rill.inference.base import Request
from rill.inference.native.engine import NativeEngine
from rill.inference.openai import OpenAIEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app
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
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
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


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_the_likeliest_tokens_are_told_beside_the_sampled_one(client: Any, is_streamed: bool) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**settings, temperature=0, stream=is_streamed)
    chunks = list(answer) if is_streamed else [answer]
    entries = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert len(entries) == 6 or chunks[-1].choices[0].finish_reason == "stop"
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert entry.top_logprobs[0].token == entry.token and values == sorted(values, reverse=True)
        assert len(values) == 3 and abs(values[0] - entry.logprob) < 1e-4


def test_the_token_route_tells_the_likeliest_by_their_ids(url: str, engine: NativeEngine) -> None:
    """As renderers' client asks for them: two more than it needs, with hints for vLLM."""
    sampling = {"logprobs": 4, "max_tokens": 5, "temperature": 0.7, "seed": 3, "flat_logprobs": True,
                "extra_args": {"prl_compact_logprobs": True}, "detokenize": False, "stop_token_ids": [2]}  # fmt: skip
    body = {"model": "tiny", "token_ids": [40, 41, 42], "sampling_params": sampling}
    headers = {"Authorization": "Bearer secret"}
    choice = http.post(f"{url}/inference/v1/generate", json=body, headers=headers).json()["choices"][0]
    request = Request(
        id="same",
        token_ids=np.array([40, 41, 42], np.int32),
        sampling=SamplingParams(max_new_tokens=5, temperature=0.7, seed=3, stop_token_ids=(2,)),
        num_top_logprobs=4,
    )
    (expected,) = engine.generate([request])
    assert expected.top is not None and choice["token_ids"] == expected.token_ids.tolist()
    for entry, ids in zip(choice["logprobs"]["content"], expected.top.token_ids.tolist(), strict=True):
        assert [t["token"] for t in entry["top_logprobs"]] == [f"token_id:{i}" for i in ids]


def test_more_likeliest_tokens_than_there_are_is_refused_by_the_fields_name(url: str) -> None:
    body = {"token_ids": [40, 41, 42], "sampling_params": {"logprobs": 200}}
    answer = http.post(f"{url}/inference/v1/generate", json=body, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "sampling_params.logprobs"


def test_answers_keep_to_a_schema_a_regex_a_grammar_or_a_choice(client: Any) -> None:
    pytest.importorskip("llguidance")
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, "temperature": 1.0}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        answer = client.chat.completions.create(**settings, seed=seed, response_format=form)
        assert answer.choices[0].finish_reason == "stop"
        assert json.loads(answer.choices[0].message.content).keys() == {"a"}

    def said(**wanted: Any) -> str:
        answer = client.chat.completions.create(**settings, extra_body={"structured_outputs": wanted})
        return str(answer.choices[0].message.content)

    assert re.fullmatch("[ab]{3}-[0-9]{2}", said(regex="[ab]{3}-[0-9]{2}"))
    assert said(choice=["yes", "no"]) in ("yes", "no")
    assert said(grammar='start: "x" ("y" | "z")') in ("xy", "xz")
    with pytest.raises(openai.BadRequestError, match="regex"):
        said(regex="((")


def test_a_required_call_is_made(client: Any) -> None:
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": n, "parameters": parameters}} for n in ("add", "sub")]
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "tools": tools}
    for choice in ("required", {"type": "function", "function": {"name": "sub"}}):
        answer = client.chat.completions.create(**settings, tool_choice=choice, seed=1).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and json.loads(call.function.arguments)["a"] in (1, 2)
        assert call.function.name == "sub" or choice == "required"


def test_embeddings_are_the_last_hidden_states(client: Any, engine: NativeEngine) -> None:
    texts = ["abc", "abd", "abc"]
    answer = client.embeddings.create(model="tiny", input=texts)
    vectors = np.array([each.embedding for each in answer.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert np.allclose(vectors[0], vectors[2], atol=1e-6) and not np.allclose(vectors[0], vectors[1])
    assert engine.tokenizer is not None
    ids = torch.tensor([engine.tokenizer.encode("abc")])
    model = load_model(MODEL, dtype=torch.float32, attention="eager")
    hidden = model.base_model(ids).last_hidden_state[0, -1].detach().numpy()
    np.testing.assert_allclose(vectors[0], hidden / np.linalg.norm(hidden), atol=1e-4)


def test_a_prompt_is_scored_in_a_stream_too(url: str) -> None:
    headers = {"Authorization": "Bearer secret"}
    sampling = {"max_tokens": 3, "prompt_logprobs": 0, "temperature": 0}
    body = {"token_ids": [40, 41, 42], "sampling_params": sampling}
    whole = http.post(f"{url}/inference/v1/generate", json=body, headers=headers).json()
    with http.stream(
        "POST", f"{url}/inference/v1/generate", json=body | {"stream": True}, headers=headers
    ) as response:
        first = json.loads(next(line for line in response.iter_lines() if line).removeprefix("data: "))
    assert first["prompt_logprobs"] == whole["prompt_logprobs"] and len(first["prompt_logprobs"]) == 3


def test_a_token_request_without_a_limit_goes_to_the_context(url: str) -> None:
    headers = {"Authorization": "Bearer secret"}
    body = {"token_ids": [40] * 200, "sampling_params": {"ignore_eos": True}}
    choice = http.post(f"{url}/inference/v1/generate", json=body, headers=headers, timeout=60).json()
    assert len(choice["choices"][0]["token_ids"]) == 56


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
    odd = {str(t): -100 for t in range(104) if t % 2}
    banned = client.completions.create(**settings, logit_bias=odd, extra_body={"ignore_eos": True})
    assert banned.usage.completion_tokens == 6


def test_a_prompt_of_several_samples_is_counted_once_cached_or_not(client: Any) -> None:
    prompts = [[5 + i] * 50 for i in range(2)]
    ask: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": 2, "n": 3}
    cached = [client.completions.create(**ask).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached == [0, 2 * 48]


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
    with BackgroundServer(create_app(fake, fake.tokenizer, config), config) as server:
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
        with BackgroundServer(create_app(native, native.tokenizer, config), config) as server:
            adapter = OpenAIEngine(OpenAIEngine.Config(url=f"{server.url}/v1", model="tiny"))
            yield adapter
            adapter.close()
        native.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return load_model(MODEL, dtype=torch.float32)
