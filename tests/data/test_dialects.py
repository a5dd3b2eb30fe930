"""The three APIs say the same: a request becomes one chat body, an answer what its client expects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rill.data.dialects import ANTHROPIC, CHAT, RESPONSES, Answer, Dialect

CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item": "tea"}'}}
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is tea?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
TOOL = {
    "type": "function",
    "function": {"name": "price", "description": "What it costs.", "parameters": SCHEMA},
}
ANSWER = Answer(
    id="0a",
    model="m",
    created=1,
    content="It is 42.",
    calls=(CALL,),
    finish_reason="tool_calls",
    num_prompt_tokens=7,
    num_completion_tokens=3,
)


def test_an_anthropic_request_is_the_chat_request_that_it_means() -> None:
    body = {
        "model": "m",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "What is tea?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "c1", "name": "price", "input": {"item": "tea"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]}
                ],
            },
        ],
        "tools": [{"name": "price", "description": "What it costs.", "input_schema": SCHEMA}],
        "stop_sequences": ["\n\n"],
    }
    assert ANTHROPIC.to_chat(body) == {
        "model": "m",
        "max_tokens": 64,
        "messages": ASKED,
        "tools": [TOOL],
        "tool_choice": "auto",
        "stop": ["\n\n"],
    }


def test_a_responses_request_is_the_chat_request_that_it_means() -> None:
    body = {
        "model": "m",
        "max_output_tokens": 64,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is tea?"}]},
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me look."}],
            },
            {"type": "function_call", "call_id": "c1", "name": "price", "arguments": '{"item": "tea"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ],
        "tools": [
            {"type": "function", "name": "price", "description": "What it costs.", "parameters": SCHEMA}
        ],
    }
    assert RESPONSES.to_chat(body) == {
        "model": "m",
        "max_tokens": 64,
        "messages": ASKED,
        "tools": [TOOL],
        "tool_choice": "auto",
    }


@pytest.mark.parametrize(
    ("dialect", "body", "says"),
    [
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        (ANTHROPIC, {"messages": []}, "not empty"),
        (
            ANTHROPIC,
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "bash_20250124"}]},
            "elsewhere",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_image",
        ),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "json_schema"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ],
)
def test_what_has_no_counterpart_is_refused_and_not_dropped(
    dialect: Dialect, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        dialect.to_chat(body)


def events(dialect: Dialect) -> list[dict[str, Any]]:
    """The answer, streamed in several pieces."""
    stream = dialect.stream(ANSWER, shows_usage=True)
    raw = stream.begin() + stream.feed("It is", ()) + stream.feed(" 42.", ()) + stream.feed("", ANSWER.calls)
    raw += stream.end(ANSWER)
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def test_the_blocks_of_an_anthropic_stream_add_up_to_the_whole_answer() -> None:
    parsed = events(ANTHROPIC)
    assert [event["type"] for event in parsed if not event["type"].endswith("_delta")] == [
        "message_start",
        *("content_block_start", "content_block_stop") * 2,
        "message_stop",
    ]
    deltas = [event["delta"] for event in parsed if event["type"] == "content_block_delta"]
    text, call = ANTHROPIC.whole(ANSWER)["content"]
    assert "".join(delta.get("text", "") for delta in deltas) == text["text"]
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == call["input"]


def test_the_stream_of_responses_ends_with_the_whole_answer_and_its_parts_add_up_to_it() -> None:
    parsed = events(RESPONSES)
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    text = "".join(event["delta"] for event in parsed if event["type"] == "response.output_text.delta")
    whole = RESPONSES.whole(ANSWER)
    assert text == whole["output"][0]["content"][0]["text"] == "It is 42."
    assert parsed[-1]["type"] == "response.completed" and parsed[-1]["response"] == whole
    done = [event["item"] for event in parsed if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


def test_chat_chunks_add_up_to_the_whole_answer() -> None:
    *chunks, last = events(CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = CHAT.whole(ANSWER)["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [{k: v for k, v in call.items() if k != "index"} for call in calls] == message["tool_calls"]
    assert last["usage"]["total_tokens"] == 10


def test_arguments_that_are_no_object_reach_an_anthropic_client_as_they_were_written() -> None:
    for written in ("{broken", "[1]", '{"a": ' + "[" * 20_000):
        call = {**CALL, "function": {"name": "price", "arguments": written}}
        (block,) = ANTHROPIC.whole(Answer(id="0a", model="m", created=1, calls=(call,)))["content"]
        assert block["input"] == {"arguments": written}


def test_an_answer_that_was_cut_off_says_so_in_every_dialect() -> None:
    cut = Answer(id="0a", model="m", created=1, content="It", finish_reason="length")
    assert CHAT.whole(cut)["choices"][0]["finish_reason"] == "length"
    assert ANTHROPIC.whole(cut)["stop_reason"] == "max_tokens"
    assert RESPONSES.whole(cut)["incomplete_details"] == {"reason": "max_output_tokens"}
    aborted = RESPONSES.whole(Answer(id="0b", model="m", created=1, content="It", finish_reason="abort"))
    assert aborted["status"] == "incomplete" and aborted["incomplete_details"] is None
