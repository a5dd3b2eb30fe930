"""The server's tools in the form that the parsers of rill.data.tool_calls take; calls in a stream; forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from rill.data import tool_calls
from rill.data.tool_calls import SYNTAXES, ToolSyntax
from rill.inference.base import Guide, GuideKind
from rill.inference.server.errors import bad_request
from rill.inference.server.schemas import Tool

_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED_HEAD = re.compile(r"\s*(?P<name>[^\s\[{]+)\s*\[ARGS\]\s*(?=\{)")
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|[{}]', re.DOTALL)


def _delta(index: int, arguments: str, name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    """What a stream tells of a call: at first its name, then its arguments as they are written."""
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}


class ToolCallStream(tool_calls.ToolCallStream):
    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool = True) -> None:
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        super().__init__(syntax, schemas, parallel=parallel)
        self._num_sent = 0
        """Characters of the arguments of the call that is being written, once its name is out; else 0."""

    def stream(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """As `feed`; calls in pieces. Arguments are the model's own text; qwen_xml's, which are no JSON, come whole."""
        num_before, block = len(self.calls), self._held + text
        content, calls = self.feed(text, is_last=is_last)
        deltas: list[dict[str, Any]] = []
        if self._num_sent and (calls or content):  # the block that was begun has ended
            arguments = self._begun(block)[1]
            deltas.append(_delta(num_before, arguments[self._num_sent :]))
            self._num_sent = 0
            calls, content = calls[1:], content if calls else ""
            num_before += 1
        deltas += [_delta(i, call.arguments, call.name, call.id) for i, call in enumerate(calls, num_before)]
        if not is_last and (self._parallel or not self.calls):
            deltas += self._tell_begun()
        return content, deltas

    def _tell_begun(self) -> list[dict[str, Any]]:
        name, arguments = self._begun(self._held)
        if not arguments or name not in self._tools:
            return []
        index, sent = len(self.calls), self._num_sent
        self._num_sent = len(arguments)
        if sent:
            return [_delta(index, arguments[sent:])] if len(arguments) > sent else []
        return [_delta(index, arguments, name, f"call_{uuid4().hex[:24]}")]

    def _begun(self, held: str) -> tuple[str, str]:
        """The name and the arguments so far of the call that stands at the beginning; empty where none can be told."""
        syntax = self._syntax
        at = held.find(syntax.open)
        start = at + len(syntax.open) if at >= 0 else 0
        if at < 0 and not syntax.is_bare_allowed:
            return "", ""
        head = _NAMED_HEAD.match(held, start) or _JSON_HEAD.match(held, start)
        return ("", "") if head is None else (head["name"], _object_at(held, head.end()))


def _object_at(text: str, start: int) -> str:
    """The JSON object that begins there, as far as it has come."""
    depth = 0
    for part in _JSON_PARTS.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return text[start : part.end()]
    return text[start:]


def forced_call(syntax: ToolSyntax, tools: Sequence[Tool], name: str | None) -> Guide:
    """A grammar of one call, of the tool of that name or of any; for the syntaxes that are JSON."""
    key = {id(SYNTAXES["hermes"]): "arguments", id(SYNTAXES["llama"]): "parameters"}.get(id(syntax))
    chosen = [tool for tool in tools if name in (None, tool.function.name)]
    if not chosen:
        raise bad_request(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    if key is None:
        raise bad_request(
            "a forced call needs tool_syntax hermes or llama: this model writes calls in another way",
            "tool_choice",
            "unsupported",
        )
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                key: tool.function.parameters or {"type": "object"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in chosen
    ]
    schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    if key == "parameters":
        return Guide(kind=GuideKind.JSON_SCHEMA, text=schema)
    wrapped = f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'
    return Guide(kind=GuideKind.GRAMMAR, text=wrapped)
