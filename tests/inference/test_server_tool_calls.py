"""Tool calls out of growing text, in the syntaxes that models are taught."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rill.data.tool_calls import SYNTAXES, detect_syntax
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.inference.server.schemas import Tool
from rill.inference.server.tool_calls import ToolCallStream
from tests.inference.fake_engine import FakeEngine
from tests.inference.plain_http import http

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
TOOLS = [Tool.model_validate(TOOL)]
ONE = [("add", {"a": 1})]
TWO = [("add", {"a": 1}), ("add", {"a": 2})]

CASES = [
    ("hermes", 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "Well. ", ONE),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
               '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>\n', "", TWO),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", ONE),
    ("hermes", "<tool_call>not a call</tool_call> and 1 < 2", "<tool_call>not a call</tool_call> and 1 < 2", []),
    ("hermes", '{"name": "add", "parameters": {}}', '{"name": "add", "parameters": {}}', []),
    ("qwen_xml", "Hm.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=city>\n12 Rue\nX\n"
                 "</parameter>\n</function>\n</tool_call>", "Hm.", [("add", {"a": 1, "city": "12 Rue\nX"})]),
    ("qwen_xml", "<tool_call><function=add>\n<parameter=city>42</parameter></function></tool_call>", "",
     [("add", {"city": "42"})]),
    ("qwen_xml", "<tool_call><function=add</tool_call>", "<tool_call><function=add</tool_call>", []),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', "", ONE),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}', "",
     TWO),
    ("llama", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("llama", 'Use {"name": "add", "parameters": {}}', 'Use {"name": "add", "parameters": {}}', []),
    ("mistral", 'Ok [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]',
     "Ok ", TWO),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}', "", TWO),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]], size: int
) -> None:
    stream = ToolCallStream(SYNTAXES[name], TOOLS)
    found_content, found = "", []
    for start in range(0, len(text), size):
        new, new_calls = stream.feed(text[start : start + size], is_last=start + size >= len(text))
        found_content += new
        found += new_calls
    assert found_content == content
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)


def streamed(name: str, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The content, and each call's name and arguments, as a client puts them together."""
    stream, content = ToolCallStream(SYNTAXES[name], TOOLS), ""
    names: list[str] = []
    arguments: list[str] = []
    for start in range(0, len(text), size):
        new, deltas = stream.stream(text[start : start + size], is_last=start + size >= len(text))
        content += new
        for delta in deltas:
            if "id" in delta:
                assert delta["index"] == len(names)
                names.append(delta["function"]["name"])
                arguments.append("")
            arguments[delta["index"]] += delta["function"]["arguments"]
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("size", [1, 2, 7, 40, 10_000])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_that_are_told_in_pieces_are_the_same_calls(
    name: str, text: str, content: str, calls: list[tuple[str, Any]], size: int
) -> None:
    found_content, found = streamed(name, text, size)
    assert found_content == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("size", [1, 2, 7, 40, 60, 80])
def test_a_call_that_turns_out_to_be_none_costs_neither_the_text_nor_the_calls_behind_it(size: int) -> None:
    wrong, right = (f'{{"name": "add", "arguments": {{"a": {value}}}}}' for value in ("tru", "2"))
    text = f"Hm <tool_call>{wrong}</tool_call> and <tool_call>{right}</tool_call> done"
    content, calls = streamed("hermes", text, size)
    assert calls[-1] == ("add", '{"a": 2}') and content.split()[-2:] == ["and", "done"]
    assert calls[:-1] == ([] if "tru" in content else [("add", '{"a": tru}')])
    content, calls = streamed("llama", '{"name": "add", "parameters": {"a": 1}} and more', size)
    assert content.split()[-2:] == ["and", "more"] and bool(calls) != ("add" in content)


@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_text_behind_a_call_keeps_its_spaces(size: int) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    content, calls = streamed("hermes", f"First\n\n{call}\n{call}\n then  that \n", size)
    assert content == "First\n\n\n then  that" and len(calls) == 2


def test_content_is_not_held_longer_than_a_marker_may_be_beginning() -> None:
    stream = ToolCallStream(SYNTAXES["hermes"], TOOLS)
    assert stream.feed("Let me see <tool")[0] == "Let me see "
    assert stream.feed("s are")[0] == "<tools are"


def test_one_call_only_where_the_client_wants_no_more() -> None:
    for name, text, _, calls in CASES:
        if len(calls) == 2:
            stream = ToolCallStream(SYNTAXES[name], TOOLS, parallel=False)
            assert len(stream.feed(text, is_last=True)[1]) == 1 == len(stream.calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n' }}{{ '{\"name\": \"' }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen_xml"),
        ("{{- '<|python_tag|>' }}", "llama"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_chat_template_says_which_syntax_it_teaches(template: str, name: str) -> None:
    assert detect_syntax(template) is SYNTAXES[name]


def test_markers_that_are_special_tokens_are_read_and_others_stay_out_of_the_text() -> None:
    engine = FakeEngine(
        FakeEngine.Config(
            answer='Ok[END][TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', vocab_size=120
        )
    )
    engine.tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[END]"]})
    config = ServerConfig(port=0, tool_syntax="mistral")
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        url = f"{server.url}/v1/chat/completions"
        message = http.post(url, json=body).json()["choices"][0]["message"]
        assert message["content"] == "Ok" and message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        plain = http.post(url, json=body | {"tool_choice": "none"}).json()["choices"][0]["message"]
        assert plain["content"] == 'Ok[{"name": "add", "arguments": {"a": 1}}]'
    engine.close()
