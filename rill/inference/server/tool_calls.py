"""The server's tools in the form that the parsers of rill.data.tool_calls take; calls in a stream; forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from rill.data import tool_calls
from rill.data.tool_calls import SYNTAXES, ParsedCall, ToolSyntax
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
        self._deltas: list[dict[str, Any]] = []
        self._num_told = 0
        """Characters of the arguments of the call that is being written, once its name is out; else 0."""

    def stream(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """As `feed`; calls in pieces. Arguments are the model's own text; qwen_xml's, which are no JSON, come whole."""
        content, _ = self.feed(text, is_last=is_last)
        if not is_last and (self._parallel or not self.calls):
            self._tell(self._held)
        deltas, self._deltas = self._deltas, []
        return content, deltas

    def _read(self, block: str) -> str:
        num_before, is_told = len(self.calls), self._num_told > 0
        rest = self._tell(block) if is_told else ""
        content = super()._read(block)
        if is_told and len(self.calls) == num_before:  # no call after all, but the client has heard of one
            self.calls.append(ParsedCall(id="", name="", arguments=""))
            content, self._blank = rest, ""
        for index, call in enumerate(self.calls[num_before + is_told :], num_before + is_told):
            self._deltas.append(_delta(index, call.arguments, call.name, call.id))
        self._num_told = 0
        return content

    def _tell(self, held: str) -> str:
        """Of the call that stands at the beginning, what is not told yet; and what comes behind its arguments."""
        syntax = self._syntax
        at = held.find(syntax.open)
        start = at + len(syntax.open) if at >= 0 else 0
        head = _NAMED_HEAD.match(held, start) or _JSON_HEAD.match(held, start)
        if head is None or head["name"] not in self._tools or (at < 0 and not syntax.is_bare_allowed):
            return ""
        arguments, told = _object_at(held, head.end()), self._num_told
        if not told:
            call_id = f"call_{uuid4().hex[:24]}"
            self._deltas.append(_delta(len(self.calls), arguments, head["name"], call_id))
        elif len(arguments) > told:
            self._deltas.append(_delta(len(self.calls), arguments[told:]))
        self._num_told = len(arguments)
        rest = held[head.end() + len(arguments) :].lstrip().removeprefix("}")
        return rest.rstrip().removesuffix(syntax.close or "").rstrip()


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
    key = {SYNTAXES["hermes"]: "arguments", SYNTAXES["llama"]: "parameters"}.get(syntax)
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
