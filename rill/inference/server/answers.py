"""The way every generation request goes, whole or streamed.

A generation route makes an `Answer` of its body and gives it to `respond`. What completions and chat have in common is
in `OpenAIAnswer`: a choice for each piece of a sample, in an envelope. Below it, what is told of one sample:
log-probabilities, token ids, why it ended; in OpenAI's and vLLM's shapes.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from rill.errors import RillError
from rill.inference.base import Completion, Request
from rill.inference.native.detokenizer import Memo
from rill.inference.server.errors import ApiError, bad_request, error_fields, to_api_error
from rill.inference.server.generation import Piece, Samples, finite
from rill.inference.server.http import DONE, Call, EventStream, encode_json, event, json_response
from rill.inference.server.sampling import new_id
from rill.inference.server.schemas import GenerationBody
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextCodec
from rill.types import Floats, StopReason


class Columns:
    """Of one answer: lists with an entry for each token, written as JSON while the tokens come."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[bytes]] = defaultdict(list)

    def add(self, lists: dict[str, Any], *, in_front: bool = False) -> None:
        for name, values in lists.items():
            parts, entries = self._parts[name], encode_json(values)[1:-1]
            if entries:
                parts.insert(0 if in_front else len(parts), entries)

    def whole(self) -> dict[str, msgspec.Raw]:
        return {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in self._parts.items()}


class Answer(ABC):
    """What a route asks the engine for, and what it makes of what comes back.

    What a whole answer tells of each token is written while further ones are made: the answers of a batch are often due
    at one time, and the engine waits for the next requests then.
    """

    def __init__(self, name: str, *, is_streamed: bool, writes_tokens: bool) -> None:
        """`name`: what /abort_requests calls it, for the same caller. `writes_tokens`: whether it tells of each token,
        and so does well to hear of them before the end."""
        self.name, self.is_streamed, self.writes_tokens = name, is_streamed, writes_tokens
        self._columns: defaultdict[int, Columns] = defaultdict(Columns)
        """By sample."""

    @abstractmethod
    def requests(self) -> list[Request]: ...

    @abstractmethod
    async def whole(self, samples: Samples) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, pieces: Sequence[Piece], samples: Samples) -> bytes:
        """Of new pieces; with the last ones, also what ends a stream."""

    @abstractmethod
    def lists(self, piece: Piece) -> dict[str, Any]:
        """By their names, with an entry for each token."""

    async def prepare(self) -> None:
        """Before the first event of a stream."""

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that began well."""
        return event({"error": error_fields(error)}) + DONE

    async def wholes(self, samples: Samples) -> list[tuple[Piece, dict[str, Any]]]:
        """Each sample, and its lists."""
        return [(piece, self._columns[piece.index].whole()) for piece in await samples.whole(self.write)]

    def write(self, piece: Piece) -> None:
        self._columns[piece.index].add(self.lists(piece))


class OpenAIAnswer(Answer):
    prefix: ClassVar[str]
    """Of its id."""
    kinds: ClassVar[tuple[str, str]]
    """What a whole answer and a chunk of a stream call themselves."""

    def __init__(self, state: ServerState, body: GenerationBody, prompts: list[list[int]]) -> None:
        self.id = new_id(self.prefix)
        super().__init__(
            body.request_id or self.id,
            is_streamed=body.stream,
            writes_tokens=body.return_token_ids,
        )
        self.state, self.body, self.prompts = state, body, prompts
        self.created = int(time.time())
        self.model = body.model or state.config.model_name
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        self._tells_usage = body.stream_options is not None and body.stream_options.include_usage

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""

    def events(self, pieces: Sequence[Piece], samples: Samples) -> bytes:
        told = [event(self.chunk(piece)) for piece in pieces]
        if not samples.num_left:  # one write for the last tokens and what follows them
            if self._tells_usage:
                told.append(event(self.envelope([], is_chunk=True) | self.usage(samples)))
            told.append(DONE)
        return b"".join(told)

    def lists(self, piece: Piece) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        # vLLM's token_ids, and our versions beside them
        return {"token_ids": piece.token_ids.tolist(), "token_versions": piece.versions.tolist()}

    def choice(self, piece: Piece, lists: dict[str, Any]) -> dict[str, Any]:
        """What completions and chat say alike of a piece."""
        choice: dict[str, Any] = {
            "index": piece.index,
            "finish_reason": finish_reason(piece.completion),
            "stop_reason": stop_detail(piece.completion),
            "logprobs": None,
        }
        if self.body.return_token_ids:
            choice |= {name: lists[name] for name in ("token_ids", "token_versions")}
        return choice

    def usage(self, samples: Samples) -> dict[str, Any]:
        return {"usage": usage(sum(map(len, self.prompts)), samples)}

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kinds[is_chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def respond(call: Call, answer: Answer) -> Response:
    """Admitted, run, and answered. The place that admission gave is held until the answer is made, or the stream has
    ended or lost its client."""
    samples = call.state.generation.submit(
        answer.requests(),
        (call.caller, answer.name),
        call.receive,
        is_streamed=answer.is_streamed,
        in_parts=answer.writes_tokens,
    )

    async def next_events() -> tuple[bytes, bool]:
        try:
            pieces = await anext(samples)
            return answer.events(pieces, samples), not samples.num_left
        except (ApiError, RillError) as error:  # the status line is sent already
            return answer.failure(to_api_error(error)), True

    try:
        if answer.is_streamed:
            await samples.begun()
            await answer.prepare()
            return EventStream(next_events, samples.close)
        response = json_response(await answer.whole(samples))
    except BaseException:
        samples.close()
        raise
    samples.close()
    return response


_FINISH = {StopReason.LENGTH: "length", StopReason.ABORTED: "abort", StopReason.ERROR: "error"}


def finish_reason(completion: Completion | None) -> str | None:
    return None if completion is None else _FINISH.get(completion.stop_reason, "stop")


def stop_detail(completion: Completion | None) -> str | int | None:
    """What ended the text, as vLLM says it: the stop string, the stop token's id, or null."""
    if completion is None or completion.stop_reason is not StopReason.STOP:
        return None
    if completion.stop_text is not None or len(completion.token_ids) == 0:
        return completion.stop_text
    return int(completion.token_ids[-1])


def usage(num_prompt: int, samples: Samples) -> dict[str, Any]:
    num_completion = sum(len(c.token_ids) for c in samples.completions.values())
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": samples.num_cached_tokens},
    }


class TopToken(msgspec.Struct, gc=False):
    """One of the likeliest tokens at a place. Not a dictionary: making and writing one costs several times as much."""

    token: str
    logprob: float
    bytes: msgspec.Raw | None = None


class TokenEntry(TopToken, gc=False):
    """One token of `logprobs.content`."""

    top_logprobs: tuple[TopToken, ...] = ()


def logprob_entries(codec: TextCodec | None, piece: Piece, *, as_ids: bool) -> list[TokenEntry] | msgspec.Raw:
    """`logprobs.content`. Without a codec, for clients that have no text, tokens have no bytes."""
    if codec is None and piece.top is None and len(piece.token_ids):
        return _plain_entries(piece)
    tops = _top_tokens(codec, piece, as_ids=as_ids) or itertools.repeat(())
    ids: list[int] = piece.token_ids.tolist()
    return list(map(TokenEntry, *_told(codec, ids, piece.logprobs, as_ids=as_ids), tops))


def _plain_entries(piece: Piece) -> msgspec.Raw:
    """The text of entries that tell no more than a token's id and its log-probability, without making them."""
    head, tail = b'{"token":"token_id:', b',"bytes":null,"top_logprobs":[]}'
    parts = [tail + b"," + head, b"", b'","logprob":', b""] * len(piece.token_ids)
    parts[1::4] = msgspec.json.encode(piece.token_ids.tolist())[1:-1].split(b",")
    parts[3::4] = msgspec.json.encode(finite(piece.logprobs))[1:-1].split(b",")
    return msgspec.Raw(b"[" + b"".join(parts)[len(tail) + 1 :] + tail + b"]")


LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def completion_logprobs(
    codec: TextCodec, piece: Piece, *, as_ids: bool, offset: int
) -> tuple[dict[str, Any], int]:
    """The older shape: parallel lists; and the offset of what comes next. Of the likeliest tokens it tells beside the
    sampled one."""
    ids, logprobs = piece.token_ids.tolist(), finite(piece.logprobs)
    texts = codec.token_texts(ids)
    names = token_names(ids) if as_ids else texts
    *offsets, end = itertools.accumulate(map(len, texts), initial=offset)
    top = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
    for own, likeliest in zip(top, _top_tokens(codec, piece, as_ids=as_ids)):
        for each in likeliest:
            own.setdefault(each.token, each.logprob)
    return dict(zip(LOGPROB_LISTS, (names, logprobs, top, offsets), strict=True)), end


def _top_tokens(codec: TextCodec | None, piece: Piece, *, as_ids: bool) -> list[tuple[TopToken, ...]]:
    """The likeliest tokens at each place; nothing where they were not asked for."""
    if piece.top is None:
        return []
    rows = zip(piece.top.token_ids.tolist(), piece.top.logprobs, strict=True)
    return [tuple(map(TopToken, *_told(codec, ids, logprobs, as_ids=as_ids))) for ids, logprobs in rows]


def _told(
    codec: TextCodec | None, ids: list[int], logprobs: Floats, *, as_ids: bool
) -> tuple[list[str], list[float], Iterable[msgspec.Raw | None]]:
    """Names, log-probabilities and bytes of these tokens."""
    texts = None if codec is None else codec.token_texts(ids)
    names = token_names(ids) if as_ids or texts is None else texts
    return names, finite(logprobs), itertools.repeat(None) if texts is None else map(_bytes_as_json, texts)


_NAMES = Memo(lambda token_id: f"token_id:{token_id}")


def token_names(token_ids: Sequence[int]) -> list[str]:
    """Tokens named by their ids, which a trainer reads back without a tokenizer."""
    return list(map(_NAMES.__getitem__, token_ids))


@lru_cache(maxsize=65536)
def _bytes_as_json(text: str) -> msgspec.Raw:
    return msgspec.Raw(f"{list(text.encode('utf-8', 'replace'))}".encode())
