"""What is told of tokens, as JSON: the same text whichever way it is made."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from starlette.types import Message

from rill.inference.base import TopTokens
from rill.inference.server.answers import TokenEntry, logprob_entries
from rill.inference.server.generation import Piece, finite
from rill.inference.server.http import EventStream, event

INF = float("inf")
LOGPROBS = {
    "usual": [-0.5, -1.25e-7, -3.0, 0.0],
    "odd": [-INF, INF, float("nan"), -1e-30, -0.0, -3.4e38, -3.4e38],
    "none": [],
}


def piece(logprobs: list[float], top: TopTokens | None = None) -> Piece:
    ids = np.arange(len(logprobs), dtype=np.int32) * 71_003
    values = np.array(logprobs, np.float32)
    return Piece(index=0, token_ids=ids, logprobs=values, versions=ids, top=top)


@pytest.mark.parametrize("logprobs", LOGPROBS.values(), ids=LOGPROBS)
def test_entries_of_ids_are_written_as_the_entries_themselves_would_be(logprobs: list[float]) -> None:
    told = piece(logprobs)
    pairs = zip(told.token_ids.tolist(), finite(told.logprobs), strict=True)
    entries = [TokenEntry(f"token_id:{token_id}", logprob) for token_id, logprob in pairs]
    assert msgspec.json.encode(logprob_entries(None, told, as_ids=True)) == msgspec.json.encode(entries)


def test_with_the_likeliest_tokens_they_are_told_too() -> None:
    top = TopTokens(token_ids=np.array([[7, 8]]), logprobs=np.array([[-0.5, -INF]], np.float32))
    (entry,) = msgspec.json.decode(
        msgspec.json.encode(logprob_entries(None, piece([-0.5], top), as_ids=True))
    )
    assert [each["token"] for each in entry["top_logprobs"]] == ["token_id:7", "token_id:8"]
    assert entry["top_logprobs"][1]["logprob"] == -9999.0


def test_numbers_that_json_lacks_become_such_as_it_has() -> None:
    assert finite(np.array([-INF, INF, np.nan, -1.0], np.float32)) == [-9999.0, 0.0, -9999.0, -1.0]


@pytest.mark.asyncio
async def test_an_event_is_one_line_also_to_clients_that_ask_unicode_for_lines() -> None:
    text, sent = "one\x0btwo\x0cthree\x1c\x1d\x1e\x85four\u2028five\u2029", b""

    async def next_events() -> tuple[bytes, bool]:
        return event({"text": text}), True

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    await EventStream(next_events, lambda: None)({}, receive, send)
    line, empty = sent.decode().splitlines()
    assert empty == "" and json.loads(line.removeprefix("data: ")) == {"text": text}
