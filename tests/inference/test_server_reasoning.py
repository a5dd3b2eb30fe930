"""Reasoning and tool calls in growing text: the parts are the same however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rill.data.tool_calls import SYNTAXES
from rill.inference.base import Feature
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.inference.server.reasoning import ReasoningStream
from rill.inference.server.schemas import FunctionTool, Tool
from rill.inference.server.tool_calls import ToolCallStream
from tests.inference.fake_engine import FakeEngine
from tests.inference.plain_http import http

REASONING = [
    ("<think>\nfirst, then\n</think>\n\nanswer", False, "first, then", "answer"),
    ("first\n</think>\nanswer <think>no</think>", True, "first", "answer <think>no</think>"),
    ("no reasoning here", False, "", "no reasoning here"),
    ("<thinner>", False, "", "<thinner>"),
    ("<think>never closed", False, "never closed", ""),
    ("", False, "", ""),
    ("<th", False, "", "<th"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), REASONING)
def test_reasoning_is_split_off(text: str, is_open: bool, reasoning: str, answer: str, size: int) -> None:
    stream = ReasoningStream(is_open=is_open)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    parts = [stream.feed(piece) for piece in pieces] + [stream.feed("", is_last=True)]
    assert "".join(first for first, _ in parts) == reasoning
    assert "".join(second for _, second in parts) == answer


TOOLS = [
    Tool(type="function", function=FunctionTool(name=name, parameters={"type": "object"}))
    for name in ("add", "say")
]
ARGUMENTS = [{"a": 1, "b": {"c": '}"{'}}, {"text": "é\n"}]
CALLS = [{"name": "add", "arguments": ARGUMENTS[0]}, {"name": "say", "arguments": ARGUMENTS[1]}]
TEXTS = {
    "hermes": "Well. " + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS),
    "mistral": "Well. " + "".join(f"[TOOL_CALLS]{c['name']}[ARGS]{json.dumps(c['arguments'])}" for c in CALLS),
    "qwen_xml": "Well. <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_streamed_calls_add_up_to_what_was_written(name: str, size: int) -> None:
    stream, text = ToolCallStream(SYNTAXES[name], TOOLS), TEXTS[name]
    parts = [stream.stream(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(stream.stream("", is_last=True))
    assert "".join(content for content, _ in parts).strip() == "Well."
    told = [delta for _, deltas in parts for delta in deltas]
    expected = [("add", {"a": 1})] if name == "qwen_xml" else [("add", ARGUMENTS[0]), ("say", ARGUMENTS[1])]
    assert sorted({delta["index"] for delta in told}) == list(range(len(expected)))
    for index, (called, arguments) in enumerate(expected):
        mine = [delta for delta in told if delta["index"] == index]
        assert mine[0]["function"]["name"] == called and mine[0]["id"] is not None
        assert not any("id" in delta or "name" in delta["function"] for delta in mine[1:])
        assert json.loads("".join(delta["function"]["arguments"] for delta in mine)) == arguments
    if size == 1 and name == "hermes":
        assert len(told) > 20, "the arguments came whole"


def test_what_begins_like_a_call_of_no_tool_stays_in_the_content() -> None:
    stream = ToolCallStream(SYNTAXES["hermes"], TOOLS)
    text = '<tool_call>{"name": "nobody", "arguments": {"a": '
    parts = [stream.stream(letter) for letter in text] + [stream.stream("", is_last=True)]
    assert "".join(content for content, _ in parts) == text and not any(deltas for _, deltas in parts)


def test_an_answer_in_a_grammar_is_content_though_the_prompt_opens_a_block_of_reasoning() -> None:
    engine = FakeEngine(FakeEngine.Config(answer='{"a": 1}'))
    engine.features = engine.features | {Feature.GUIDED}  # type: ignore[misc]
    config, template = ServerConfig(port=0), "{{ messages[0]['content'] }}<think>\n{# </think> #}"
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    app = create_app(engine, engine.tokenizer, config, chat_template=template)  # type: ignore[arg-type]
    with BackgroundServer(app, config) as server:
        url = f"{server.url}/v1/chat/completions"
        free = http.post(url, json=ask, timeout=20).json()["choices"][0]["message"]
        guided = http.post(url, json=ask | {"response_format": {"type": "json_object"}}, timeout=20).json()
    engine.close()
    assert free["reasoning_content"] == '{"a": 1}' and not free["content"]
    assert guided["choices"][0]["message"] == {"role": "assistant", "content": '{"a": 1}'}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_of_a_reasoning_model_has_both_parts(is_streamed: bool) -> None:
    engine = FakeEngine(FakeEngine.Config(answer="<think>\nhm\n</think>\n\nYes."))
    config = ServerConfig(port=0, reasoning="think")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": is_streamed}
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        text = http.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).text
    engine.close()
    if is_streamed:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        parts = [event["choices"][0]["delta"] for event in events]
    else:
        parts = [json.loads(text)["choices"][0]["message"]]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "hm"
    assert "".join(part.get("content") or "" for part in parts) == "Yes."
