"""An answer in two parts is the answer in one."""

from __future__ import annotations

import numpy as np
import pytest

from rill.inference.base import Completion, Request
from rill.inference.continued import joined, rest_of
from rill.types import SamplingParams, StopReason, TokenIds


def said(text: str, version: int, reason: StopReason = StopReason.ABORTED, **more: object) -> Completion:
    """One token to a letter."""
    return Completion(
        request_id="r",
        token_ids=np.array([ord(letter) for letter in text], np.int32),
        logprobs=-np.arange(len(text), dtype=np.float32),
        versions=np.full(len(text), version, np.int32),
        stop_reason=reason,
        **more,  # type: ignore[arg-type]
    )


def text_of(token_ids: TokenIds) -> str:
    return "".join(chr(token) for token in token_ids)


def test_the_rest_is_asked_for_behind_what_was_said_and_within_the_same_limits() -> None:
    sampling = SamplingParams(max_new_tokens=10, min_new_tokens=4, temperature=0.7, seed=5)
    asked = Request(id="r", token_ids=np.array([1, 2], np.int32), sampling=sampling)
    request = rest_of(asked, said("abc", 1).token_ids)
    assert request.token_ids.tolist() == [1, 2, ord("a"), ord("b"), ord("c")]
    assert (request.sampling.max_new_tokens, request.sampling.min_new_tokens) == (7, 1)
    assert request.sampling.temperature == 0.7


def test_both_parts_keep_their_tokens_logprobs_and_versions() -> None:
    whole = joined(said("abc", 1), said("de", 3, StopReason.EOS), (), text_of)
    assert (text_of(whole.token_ids), whole.stop_reason) == ("abcde", StopReason.EOS)
    assert whole.versions.tolist() == [1, 1, 1, 3, 3]
    assert whole.logprobs.tolist() == [0, -1, -2, 0, -1]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("one\n", "\ntwo", "one\n\n"),  # across the place where it was cut
        ("one", "two\n\n", "onetwo\n\n"),  # where the engine saw it itself
        ("one", "two", "onetwo"),
        ("one#\n", "\n\n\n", "one#\n\n"),
    ],
)
def test_a_stop_string_across_the_cut_ends_the_answer_there(first: str, second: str, expected: str) -> None:
    whole = joined(said(first, 1), said(second, 2, StopReason.LENGTH), ("\n\n",), text_of)
    assert text_of(whole.token_ids) == expected
    assert len(whole.logprobs) == len(whole.versions) == len(expected)
    is_stopped = expected.endswith("\n\n")
    assert whole.stop_reason is (StopReason.STOP if is_stopped else StopReason.LENGTH)
    assert whole.stop_text == ("\n\n" if is_stopped else None)


def test_expert_choices_are_those_of_the_pass_that_sampled_the_token() -> None:
    first = said("ab", 1, routed_experts=np.full((2, 3, 1), 5))
    second = said(
        "cd\n", 2, StopReason.EOS, routed_experts=np.full((7, 3, 1), 6)
    )  # two of a prompt, two said before
    whole = joined(first, second, ("\n",), text_of)
    assert whole.routed_experts.shape == (5, 3, 1)
    assert whole.routed_experts[:, 0, 0].tolist() == [5, 5, 6, 6, 6]
    unknown = joined(said("ab", 1), second, ("d",), text_of)
    assert unknown.routed_experts[:, 0, 0].tolist() == [-1, -1, 6, 6], (
        "cut with the tokens; the trainer routes the rest"
    )
