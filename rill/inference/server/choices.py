"""One sample of an answer: text, log-probabilities, token ids, why it ended; in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec

from rill.inference.base import Completion
from rill.inference.server.generation import Piece, finite
from rill.inference.server.text import Memo, TextCodec
from rill.types import Floats, StopReason

_FINISH = {
    StopReason.EOS: "stop",
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORTED: "abort",
}


def finish_reason(completion: Completion | None) -> str | None:
    return None if completion is None else _FINISH.get(completion.stop_reason, "error")


def stop_detail(completion: Completion | None) -> str | int | None:
    """What ended the text, as vLLM says it: the stop string, the stop token's id, or null."""
    if completion is None or completion.stop_reason is not StopReason.STOP:
        return None
    if completion.stop_text is not None or len(completion.token_ids) == 0:
        return completion.stop_text
    return int(completion.token_ids[-1])


def usage(num_prompt: int, completions: Sequence[Completion]) -> dict[str, Any]:
    num_completion = sum(len(c.token_ids) for c in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in completions)},
    }


class TopToken(msgspec.Struct, gc=False):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: msgspec.Raw | None = None


class TokenEntry(msgspec.Struct, gc=False):
    """One token of `logprobs.content`. Not a dictionary: making and writing one costs several times as much."""

    token: str
    logprob: float
    bytes: msgspec.Raw | None = None
    top_logprobs: tuple[TopToken, ...] = ()


def logprob_entries(codec: TextCodec | None, piece: Piece, *, as_ids: bool) -> list[TokenEntry]:
    """`logprobs.content`. Without a codec, for clients that have no text, tokens have no bytes."""
    tops = _top_tokens(codec, piece, as_ids=as_ids) or itertools.repeat(())
    ids: list[int] = piece.token_ids.tolist()
    return list(map(TokenEntry, *_told(codec, ids, piece.logprobs, as_ids=as_ids), tops))


def completion_logprobs(codec: TextCodec, piece: Piece, *, as_ids: bool, offset: int) -> dict[str, Any]:
    """The older shape: parallel lists. Of the likeliest tokens it tells beside the sampled one."""
    ids, logprobs = piece.token_ids.tolist(), finite(piece.logprobs)
    texts = codec.token_texts(ids)
    names = token_names(ids) if as_ids else texts
    offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
    top = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
    for own, likeliest in zip(top, _top_tokens(codec, piece, as_ids=as_ids)):
        for each in likeliest:
            own.setdefault(each.token, each.logprob)
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


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
