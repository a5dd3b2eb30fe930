"""Tool calls as models write them, taken out of growing text.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>                         Hermes, Qwen2.5, Qwen3
    qwen_xml  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>    Qwen3-Coder
    llama     {"name": …, "parameters": {…}}, alone or after <|python_tag|>, `;` between several   Llama 3
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}]  or  [TOOL_CALLS]NAME[ARGS]{…}           Mistral
    glm       <tool_call>NAME <arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>       GLM 4.5 and later
    kimi      <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>  Kimi K2
    deepseek  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>                            DeepSeek V3, R1

A model's chat template teaches it one of them, so the template says which one to read (`detect_syntax`); an operator
can name one instead. `ToolCallStream` hands out what lies outside of calls as content, and a call when it is complete.
What looks like a call and is none stays in the content, so that nothing is lost. Callers: the server, agents.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    arguments: str
    """JSON, as OpenAI has it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""
Parser = Callable[[str, Tools], list[ParsedCall] | None]
"""The calls of one block, without its markers; None where it holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSyntax:
    open: str
    close: str | None
    """None: a block goes to the end of the text."""
    parse: Parser
    is_bare_allowed: bool = False
    """A text that begins with `{` may be a call without the marker."""
    inner: tuple[str, ...] = ()
    """Further markers inside of a block."""

    @property
    def markers(self) -> tuple[str, ...]:
        """They may be special tokens, which are left out of other text."""
        return (self.open, *self.inner) if self.close is None else (self.open, self.close, *self.inner)


class ToolCallStream:
    """Splits growing text into content and calls."""

    def __init__(self, syntax: ToolSyntax, tools: Tools, *, parallel: bool = True) -> None:
        self._syntax = syntax
        self._tools = tools
        self._parallel = parallel
        self._held = ""
        self._has_content = False
        self._blank = ""
        """Behind a call, and not yet known to be content."""
        self.calls: list[ParsedCall] = []

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[ParsedCall]]:
        """The content and the calls that became final."""
        self._held += text
        content, num_before = "", len(self.calls)
        while (start := self._block_start()) is not None:
            content += self._visible(self._held[:start])
            self._held = self._held[start:]
            block = self._take_block(is_last)
            if block is None:
                return content, self.calls[num_before:]
            content += self._read(block)
        keep = 0 if is_last else held_back(self._held, (self._syntax.open,))
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return content + self._visible(out), self.calls[num_before:]

    def _block_start(self) -> int | None:
        start = self._held.find(self._syntax.open)
        if start >= 0:
            return start
        is_bare = self._syntax.is_bare_allowed and not self._has_content and not self.calls
        return 0 if is_bare and self._held.lstrip().startswith("{") else None

    def _take_block(self, is_last: bool) -> str | None:
        """The block that stands at the beginning, once it is whole."""
        close = self._syntax.close
        end = -1 if close is None else self._held.find(close)
        if end < 0 and not is_last:
            return None
        size = len(self._held) if end < 0 else end + len(close or "")
        block, self._held = self._held[:size], self._held[size:]
        return block

    def _read(self, block: str) -> str:
        """Take the block's calls; the content that it is where it holds none."""
        syntax = self._syntax
        inner = block.strip().removeprefix(syntax.open).removesuffix(syntax.close or "")
        try:
            calls = syntax.parse(inner.strip(), self._tools)
            for call in calls or ():
                (call.name + call.arguments).encode()
        except (RecursionError, UnicodeEncodeError):  # thousands of brackets; half a character
            calls = None
        if calls is not None and not block.startswith(syntax.open):
            # Without a marker, an answer that is JSON looks the same: only the names of tools tell.
            calls = calls if all(call.name in self._tools for call in calls) else None
        if calls is None:
            return self._visible(block)
        self.calls += calls if self._parallel else calls[: 1 - len(self.calls)]
        self._blank = ""
        return ""

    def _visible(self, text: str) -> str:
        """Behind a call blanks are content where text follows them, and nothing before another call and at the end."""
        if self.calls:
            held = self._blank + text
            text = held.rstrip()
            self._blank = held[len(text) :]
        self._has_content |= bool(text.strip())
        return text


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many last characters of the text may be the beginning of one of the markers."""
    for length in range(min(len(text), max((len(m) for m in markers), default=1) - 1), 0, -1):
        if any(len(m) > length and text.endswith(m[:length]) for m in markers):
            return length
    return 0


# --- one parser for each syntax ----------------------------------------------------------------------------


_raw_decode = json.JSONDecoder().raw_decode
_as_json = json.JSONEncoder(ensure_ascii=False).encode


class _OneCall(msgspec.Struct):
    """What most calls are; their arguments as the model wrote them."""

    name: str
    arguments: msgspec.Raw


_one_call = msgspec.json.Decoder(_OneCall).decode


def _parse_json_calls(text: str, tools: Tools) -> list[ParsedCall] | None:
    """JSON objects with a name and arguments: one, an array, or several with `;`, `,` or space between."""
    try:
        one = _one_call(text)
        arguments = bytes(one.arguments).decode()
    except (msgspec.DecodeError, UnicodeError):
        arguments = ""
    if arguments.startswith("{"):
        return [_new_call(one.name, arguments)]
    found, at = [], 0
    while at < len(text):
        try:
            value, at = _raw_decode(text, at)
        except ValueError:
            return None
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in "; ,\n\r\t":
            at += 1
    calls = [_call_of(value) for value in found]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def _parse_named_calls(text: str, tools: Tools) -> list[ParsedCall] | None:
    """NAME[ARGS]{…}, several one after the other; Mistral's older models write an array of objects."""
    if "[ARGS]" not in text:
        return _parse_json_calls(text, tools)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]")
        value = _decode(arguments)
        if not name.strip() or not isinstance(value, dict):
            return None
        calls.append(_new_call(name.strip(), value))
    return calls


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_xml_call(text: str, tools: Tools) -> list[ParsedCall] | None:
    """Values stand as plain text; the tool's schema says which of them are not strings."""
    if (function := _FUNCTION.fullmatch(text)) is None:
        return _parse_json_calls(text, tools)
    name = function[1].strip()
    return [_new_call(name, _typed(name, _PARAMETER.findall(function[2]), tools))]


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_keyed_call(text: str, tools: Tools) -> list[ParsedCall] | None:
    """The name, then keys and values as plain text."""
    name, mark, _ = text.partition("<arg_key>")
    name = name.strip()
    if not name or any(letter in name for letter in '<>{}"\n') or (not mark and name not in tools):
        return None
    return [_new_call(name, _typed(name, _ARGUMENT.findall(text), tools))]


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    """Values that stand as plain text, as what the tool's schema says they are."""
    properties = tools.get(name, {}).get("properties")
    arguments = {}
    for key, text in ((key.strip(), text) for key, text in pairs):
        declared = properties.get(key) if isinstance(properties, dict) else None
        is_string = isinstance(declared, dict) and declared.get("type") == "string"
        value = None if is_string else _decode(text)
        arguments[key] = text if value is None and text.strip() != "null" else value
    return arguments


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"<\|tool_call_end\|>",
    re.DOTALL,
)
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([\w.-]+)\s*```json(.*?)```\s*|([\w.-]+)<｜tool▁sep｜>(.*?))"
    r"<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _marked_calls(pattern: re.Pattern[str]) -> Parser:
    """Calls between markers of their own, arguments in JSON."""

    def parse(text: str, tools: Tools) -> list[ParsedCall] | None:
        calls = []
        for groups in pattern.findall(text):
            name, arguments = [group for group in groups if group][:2] if any(groups) else ("", "")
            value = _decode(arguments)
            if not isinstance(value, dict):
                return None
            calls.append(_new_call(name, value))
        return calls or None

    return parse


def _call_of(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return _new_call(value["name"], value.get("arguments", value.get("parameters", {})))


def _new_call(name: str, arguments: Any) -> ParsedCall:
    text = arguments if isinstance(arguments, str) else _as_json(arguments)
    return ParsedCall(id=f"{_CALL}{next(_count):08x}", name=name, arguments=text)


_CALL = f"call_{secrets.token_hex(8)}"
_count = itertools.count()


def _decode(text: str) -> Any:
    """None for what is not JSON, too."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


SYNTAXES: dict[str, ToolSyntax] = {
    "hermes": ToolSyntax(open="<tool_call>", close="</tool_call>", parse=_parse_json_calls),
    "qwen_xml": ToolSyntax(open="<tool_call>", close="</tool_call>", parse=_parse_xml_call),
    "llama": ToolSyntax(open="<|python_tag|>", close=None, parse=_parse_json_calls, is_bare_allowed=True),
    "mistral": ToolSyntax(open="[TOOL_CALLS]", close=None, parse=_parse_named_calls, inner=("[ARGS]",)),
    "glm": ToolSyntax(open="<tool_call>", close="</tool_call>", parse=_parse_keyed_call),
    "kimi": ToolSyntax(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        parse=_marked_calls(_KIMI),
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek": ToolSyntax(
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        parse=_marked_calls(_DEEPSEEK),
        inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
}


def detect_syntax(template: str) -> ToolSyntax:
    """What the chat template teaches its model to write."""
    for sign, name in (
        ("[TOOL_CALLS]", "mistral"),
        ("<arg_key>", "glm"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<function=", "qwen_xml"),
        ("<tool_call>", "hermes"),
        ("<|python_tag|>", "llama"),
        ('"parameters": dictionary', "llama"),
    ):
        if sign in template:
            return SYNTAXES[name]
    return SYNTAXES["hermes"]
