"""An answer that was cut off and goes on later: the request that continues it, and the two parts as one.

Tokens, log-probabilities and versions of both parts stay as they were sampled: the answer tells for every token which
policy made it. Pure functions; called by the policy client and by flights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rill.inference.base import Completion, Delta, Request, TopTokens
from rill.types import SamplingParams, StopReason, TokenIds

Decode = Callable[[TokenIds], str]


def nothing_said(request: Request) -> Completion:
    """The answer to a request that was put back before the engine saw it."""
    return Completion(
        request_id=request.id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        stop_reason=StopReason.ABORTED,
    )


def rest_of(request: Request, said: TokenIds) -> Request:
    """The same request behind what was said to it, which counts towards its limits."""
    sampling, num_said = request.sampling, len(said)
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, said]),
        num_generated=request.num_generated + num_said,
        sampling=replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens - num_said,
            min_new_tokens=max(0, sampling.min_new_tokens - num_said),
        ),
    )


def continued(before: Completion, prompt: TokenIds, sampling: SamplingParams) -> Request:
    """Asks for the rest."""
    asked = Request(id=before.request_id, token_ids=prompt, sampling=sampling)
    rest = rest_of(asked, before.token_ids)
    assert rest.sampling.max_new_tokens > 0, f"{asked.id} had reached its limit and was cut off all the same"
    return rest


def joined(before: Completion, after: Completion, stop: Sequence[str], decode: Decode) -> Completion:
    """Both parts as one answer, ended where the engine would have ended it in one go."""
    whole = replace(after, **together([before, after]))
    return _ended_at(whole, len(before.token_ids), stop, decode) if stop else whole


def together(parts: Sequence[Delta | Completion]) -> dict[str, Any]:
    """The tokens of the parts with all that belongs to them, one after the other; fields of a Completion."""
    kinds = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
    found: dict[str, Any] = {
        name: np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in parts)], dtype=kind)
        for name, kind in kinds.items()
    }
    found["top"] = TopTokens.joined(part.top for part in parts)
    return found | {"routed_experts": _joined_experts(parts)}


def _joined_experts(parts: Sequence[Delta | Completion]) -> Any:
    """[T, L, K] of the sampled tokens alone, each as the pass that sampled it chose; -1 where a part has none."""
    known = [None if isinstance(part, Delta) else part.routed_experts for part in parts]
    shape = next((experts.shape[1:] for experts in known if experts is not None), None)
    if shape is None:
        return None
    rows = []
    for part, experts in zip(parts, known, strict=True):
        count = len(part.token_ids)
        unknown = np.full((count, *shape), -1, np.int16)
        # The prompt's rows, where there are any, come first.
        rows.append(unknown if experts is None else experts[len(experts) - count :])
    return np.concatenate(rows, dtype=np.int16, casting="unsafe")


def _ended_at(whole: Completion, num_before: int, stop: Sequence[str], decode: Decode) -> Completion:
    """A stop string may begin in the first part and end in the second, where the engine does not see it."""

    def found(length: int) -> str | None:
        text = decode(whole.token_ids[:length])
        return next((each for each in stop if each in text), None)

    total = len(whole.token_ids)
    end = bisect_left(range(total + 1), True, lo=num_before, key=lambda length: found(length) is not None)
    if end >= total:  # not there, or at the very end: the engine has seen it, or the last token completes it
        text = found(total)
        return whole if text is None else replace(whole, stop_reason=StopReason.STOP, stop_text=text)
    return replace(
        whole,
        token_ids=whole.token_ids[:end],
        logprobs=whole.logprobs[:end],
        versions=whole.versions[:end],
        routed_experts=None if whole.routed_experts is None else whole.routed_experts[:end],
        stop_reason=StopReason.STOP,
        stop_text=found(end),
    )
