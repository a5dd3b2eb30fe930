"""A conversation as its agent has heard it: where a list of messages goes on.

    Heard ── user ── assistant (reply) ── tool ── assistant (reply)
                └─── another history

A Heard stands for the messages up to one of them; a Talk is one list of them, and has what tools are on offer in it.
Messages are the same when they say the same, however a client writes them: the order of a call's arguments, the ids of
calls and an empty content make no difference. Those that the caller keeps are known by being the same objects. Used by
rill.envs.agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rill.data.messages import read_message
from rill.envs.tokens import Node
from rill.envs.tools import Tool, as_tool
from rill.errors import DataError
from rill.types import Message

Messages = Sequence[Message | Mapping[str, Any]]
Tools = Sequence[Tool | Callable[..., Any] | Mapping[str, Any]]
"""Functions, tools, or their schemas in the OpenAI form."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted", enc_hook=str).encode


class Heard:
    __slots__ = ("_followers", "_last", "asked", "message", "reply")

    def __init__(self, message: Message | None = None) -> None:
        self.message = message
        self.reply: Node | None = None
        """Where the agent said this message; None: it was not the agent."""
        self.asked: Node | None = None
        """What was asked for an answer to it; None: not yet."""
        self._followers: dict[Hashable, Heard] | None = None
        """By key, where there are several."""
        self._last: Heard | None = None

    def then(self, message: Message) -> Heard:
        """With this message behind it."""
        last = self._last
        if last is None:
            found = Heard(message)
        elif last.message is message:
            return last
        else:
            if self._followers is None:
                assert last.message is not None
                self._followers = {key_of(last.message): last}
            found = self._followers.setdefault(key_of(message), Heard(message))
            found.message = message
        self._last = found
        return found


@dataclass(slots=True, kw_only=True)
class Offer:
    """Tools as a conversation has them."""

    tools: Tools
    """Kept, so that their ids stay theirs."""
    box: dict[str, Tool]
    """Those that can be called, by name."""
    schemas: list[dict[str, Any]]
    parameters: dict[str, Any]
    """By name."""
    key: bytes
    """Equal for tools that are offered in the same words."""
    start: Heard = field(default_factory=Heard)
    """What conversations with them begin with."""

    @staticmethod
    def of(tools: Tools) -> Offer:
        given = [tool if isinstance(tool, Mapping) else as_tool(tool) for tool in tools]
        schemas = [tool.schema() if isinstance(tool, Tool) else dict(tool) for tool in given]
        functions = [schema.get("function") for schema in schemas]
        names = [each.get("name") if isinstance(each, Mapping) else None for each in functions]
        if doubled := {
            str(name) for name in names if names.count(name) > 1 or not isinstance(name, str) or not name
        }:
            raise DataError(f"tools need a name each, and no two the same: {', '.join(sorted(doubled))}")
        parameters = {s["function"]["name"]: s["function"].get("parameters") or {} for s in schemas}
        for name, schema in parameters.items():
            if not isinstance(schema, Mapping):
                raise DataError(f"tool {name}: its parameters must be a JSON schema, not {schema!r:.80}")
        key = _encode(schemas) if schemas else b""
        box = {tool.name: tool for tool in given if isinstance(tool, Tool)}
        return Offer(tools=tuple(tools), box=box, schemas=schemas, parameters=parameters, key=key)


class Talk:
    """A conversation while it is had: each message is looked at once."""

    __slots__ = ("heard", "last", "messages", "num_answered", "offer")

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.messages: list[Message] = []
        self.heard = offer.start
        self.last: Node | None = None
        """The agent's last reply in it."""
        self.num_answered = 0
        """Messages up to that reply."""

    def hear(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.messages.append(message)
            self.heard = self.heard.then(message)
            if self.heard.reply is not None:
                self.last, self.num_answered = self.heard.reply, len(self.messages)


def key_of(message: Message) -> Hashable:
    """Equal for messages that say the same."""
    calls = tuple(map(_call_key, message.tool_calls)) if message.tool_calls else ()
    return (message.role, message.content or "", message.pictures, calls)


def as_message(message: Message | Mapping[str, Any]) -> Message:
    """A message in rill's form, or as the OpenAI API has it."""
    return message if isinstance(message, Message) else read_message(message)


def _call_key(call: Mapping[str, Any]) -> tuple[str, bytes]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = _decode(arguments)
    return str(function.get("name")), _encode(arguments)
