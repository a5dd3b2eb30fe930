"""Tool calls in the formats that model families are taught; those that the server streams are tested with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rill.data.tool_calls import SYNTAXES, ToolCallStream, detect_syntax

TOOLS = {"add": {"properties": {"a": {"type": "integer"}, "city": {"type": "string"}}}}
CASES = [
    ("glm", "Hm.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>city</arg_key>\n"
            "<arg_value>12</arg_value>\n</tool_call>", "Hm.", [("add", {"a": 1, "city": "12"})]),
    ("glm", "<tool_call>add</tool_call>", "", [("add", {})]),
    ("glm", "<tool_call>what is this</tool_call>", "<tool_call>what is this</tool_call>", []),
    ("kimi", "Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
             '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 2}'
             "<|tool_call_end|><|tool_calls_section_end|>", "Ok", [("add", {"a": 1}), ("add", {"a": 2})]),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
                 '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [("add", {"a": 1})]),
    ("deepseek", 'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
                 "<｜tool▁calls▁end｜>", "So.", [("add", {"a": 1})]),
    ("hermes", 'A\n<tool_call>{"name": "add"}</tool_call>\n<tool_call>{"name": "add"}</tool_call>\nB  c\n', "A\n\nB  c",
     [("add", {}), ("add", {})]),
    ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>",
     "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[Any]
) -> None:
    for size in (1, 7, 10_000):
        stream = ToolCallStream(SYNTAXES[name], TOOLS)
        found_content, found = "", []
        for start in range(0, len(text), size):
            new, new_calls = stream.feed(text[start : start + size], is_last=start + size >= len(text))
            found_content += new
            found += new_calls
        assert found_content == content
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    if name != "glm" or "<arg_key>" in text:
        assert detect_syntax(text) is SYNTAXES[name], "a template that writes this teaches it"


DEEP = '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"city": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("llama", f'{{"name": "add", "parameters": {DEEP}}}'),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{DEEP}"),
        ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {DEEP}}}]'),
    ],
    ids=["hermes, deep", "half a character", "in the name", "llama", "mistral", "mistral, older"],
)
def test_what_no_reader_takes_is_content(name: str, text: str) -> None:
    assert ToolCallStream(SYNTAXES[name], TOOLS).feed(text, is_last=True) == (text, [])
