"""OpenAI's Responses and Anthropic's messages, by their own clients, against a live server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from rill.inference.server import BackgroundServer, ServerConfig, create_app
from tests.inference.fake_engine import FakeEngine
from tests.inference.plain_http import http

CALL = 'Hm. <tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = FakeEngine(FakeEngine.Config(answer=CALL, vocab_size=120))
    config = ServerConfig(port=0, model_name="tiny", api_keys=["secret"])  # type: ignore[list-item]
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        yield server.url
    engine.close()


def test_anthropics_client_gets_the_same_from_a_message_and_from_its_stream(url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=60)
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 100,
        "system": "Ask.",
        "messages": [{"role": "user", "content": "What is tea?"}],
        "tools": [{"name": "price", "input_schema": SCHEMA}],
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        text, call = message.content
        assert text.text.strip() == "Hm." and call.name == "price" and call.input == {"item": "tea"}
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 10


def test_openais_client_gets_the_same_from_a_response_and_from_its_stream(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60)
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_output_tokens": 100,
        "input": "What is tea?",
        "tools": [{"type": "function", "name": "price", "parameters": SCHEMA, "strict": False}],
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        message, call = response.output
        assert message.content[0].text.strip() == "Hm." and call.arguments == '{"item": "tea"}'
        assert response.status == "completed" and response.usage.output_tokens > 10


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 400}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}),
    ],
)
def test_an_answer_is_aborted_by_the_id_that_its_client_sees(path: str, asked: dict[str, Any]) -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.01))
    config = ServerConfig(port=0)
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        with http.stream("POST", f"{server.url}{path}", json=asked | {"stream": True}) as response:
            lines = response.iter_lines()
            name = next(found[1] for line in lines if (found := re.search(r'"id":"((resp|msg)_\w+)"', line)))
            answer = http.post(f"{server.url}/abort_requests", json={"request_ids": [name]})
            assert answer.json()["aborted"] == 1 and sum(1 for _ in lines) < 400
    engine.close()


def test_mistakes_are_told_in_the_words_of_the_dialect(url: str) -> None:
    asked = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    for path, body, key, status in (
        ("/v1/messages", asked, "wrong", 401),
        ("/v1/messages", {**asked, "messages": []}, "secret", 400),
        ("/v1/messages", {**asked, "temperature": "hot"}, "secret", 400),
        ("/v1/messages", {**asked, "model": "nobody"}, "secret", 404),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "secret", 400),
        ("/v1/responses", [], "secret", 400),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "secret", 400),
    ):
        answer = http.post(f"{url}{path}", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status, (path, body, answer.text)
        said = answer.json()
        assert said["error"]["message"] and (said.get("type") == "error") == path.endswith("messages")
    assert "max_output_tokens must be at least 1" in said["error"]["message"], "as it was asked for"
