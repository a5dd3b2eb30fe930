from __future__ import annotations

import json

from rill.data.chat import message_dict
from rill.envs.conversation import Heard, Offer
from rill.types import Message


def call(arguments: object, name: str = "f", ident: str = "1", content: str = "") -> Message:
    said = {"id": ident, "function": {"name": name, "arguments": arguments}}
    return Message(role="assistant", content=content, tool_calls=(said,))


def test_a_conversation_is_recognised_however_a_client_writes_it() -> None:
    start = Heard()
    known = start.then(call({"a": 1, "b": 2}))
    assert start.then(call(json.dumps({"b": 2, "a": 1}), ident="2")) is known
    assert start.then(call({"a": 1, "b": 3})) is not known
    assert start.then(call({"a": 1, "b": 2}, name="g")) is not known
    assert start.then(call({"a": 1, "b": 2}, content="so")) is not known
    assert start.then(call({"a": 1, "b": 2})) is known


def test_what_is_no_json_is_compared_as_it_is() -> None:
    start = Heard()
    known = start.then(call("{broken"))
    assert start.then(call("{broken")) is known and start.then(call("{broken ")) is not known


def test_the_same_words_behind_other_words_are_another_conversation() -> None:
    start, said = Heard(), Message(role="user", content="go on")
    first = start.then(Message(role="user", content="a")).then(said)
    assert start.then(Message(role="user", content="b")).then(said) is not first
    assert start.then(Message(role="user", content="a")).then(said) is first


def test_tools_are_the_same_whatever_the_order_of_their_keys() -> None:
    one, other = (
        {"function": {"name": "f", "description": "d"}},
        {"function": {"description": "d", "name": "f"}},
    )
    assert Offer.of([one]).key == Offer.of([other]).key != Offer.of([]).key


def test_arguments_of_thousands_of_brackets_are_compared_and_shown_as_they_are() -> None:
    deep = '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}"
    start = Heard()
    known = start.then(call(deep))
    assert start.then(call(deep)) is known and start.then(call("{}")) is not known
    (shown,) = message_dict(call(deep))["tool_calls"]
    assert shown["function"]["arguments"] == deep
