"""One sample of an answer: text, log-probabilities, token ids, why it ended; in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec

from rill.inference.base import Completion
from rill.inference.server.generation import Piece, finite
from rill.inference.server.text import TextCodec
from rill.types import StopReason

_FINISH = {
    StopReason.EOS: "stop",
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORTED: "abort",
}


def finish_reason(completion: Completion) -> str:
    return _FINISH.get(completion.stop_reason, "error")


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


def as_piece(index: int, completion: Completion) -> Piece:
    """A completion that was not streamed, as the only piece of its stream."""
    return Piece(
        index=index,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        completion=completion,
    )


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


def chat_logprobs(codec: TextCodec, piece: Piece, *, as_ids: bool, num_top: int = 0) -> dict[str, Any]:
    """`num_top` is 0, or 1 where the sampled token is known to be the top one."""
    ids, logprobs = piece.token_ids.tolist(), finite(piece.logprobs)
    texts = codec.token_texts(ids)
    names = token_names(ids) if as_ids else texts
    content = []
    for name, text, logprob in zip(names, texts, logprobs, strict=True):
        letters = _bytes_as_json(text)
        top = (TopToken(name, logprob, letters),) * num_top
        content.append(TokenEntry(name, logprob, letters, top))
    return {"content": content, "refusal": None}


def completion_logprobs(
    codec: TextCodec, token_ids: Sequence[int], logprobs: Sequence[float | None], *, as_ids: bool, offset: int
) -> dict[str, Any]:
    """The older shape: parallel lists."""
    texts = codec.token_texts(token_ids)
    names = token_names(token_ids) if as_ids else texts
    offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
    top = [None if lp is None else {name: lp} for name, lp in zip(names, logprobs, strict=True)]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def token_names(token_ids: Sequence[int]) -> list[str]:
    """Tokens named by their ids, which a trainer reads back without a tokenizer."""
    return [f"token_id:{token_id}" for token_id in token_ids]


@lru_cache(maxsize=65536)
def _bytes_as_json(text: str) -> msgspec.Raw:
    return msgspec.Raw(f"{list(text.encode('utf-8', 'replace'))}".encode())


def token_fields(piece: Piece) -> dict[str, Any]:
    """What `return_token_ids` adds to a choice: vLLM's token_ids, and our versions beside them."""
    return {"token_ids": piece.token_ids.tolist(), "token_versions": piece.versions.tolist()}
