"""A replica's reports on their way to the driver: packed, and in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rill.config import PartConfig
from rill.errors import EngineError, StuckError
from rill.inference.base import Completion, Delta, Request, TopTokens
from rill.inference.replica import End, Outbox, PackedDeltas, PackedEnds, Replica, ReplicaProcess
from rill.types import StopReason


def delta(name: str, *tokens: int, reason: StopReason | None = None) -> Delta:
    return Delta(
        request_id=name,
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        versions=np.full(len(tokens), 3, np.int32),
        stop_reason=reason,
    )


def completion(name: str, *tokens: int) -> Completion:
    made = delta(name, *tokens)
    return Completion(
        request_id=name,
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        versions=made.versions,
        stop_reason=StopReason.LENGTH,
    )


def contents(packed: PackedDeltas | None) -> dict[str, list[int]]:
    return {} if packed is None else {d.request_id: d.token_ids.tolist() for d in packed.unpack(Delta)}


def test_packing_keeps_every_token_with_its_request() -> None:
    packed = PackedDeltas.pack([delta("a", 1), delta("b", 7, 8), delta("a", 2, 3, reason=StopReason.EOS)])
    assert packed is not None
    first, second = packed.unpack(Delta)
    assert first.token_ids.tolist() == [1, 2, 3] and first.logprobs.tolist() == [-1, -2, -3]
    assert first.stop_reason is StopReason.EOS and second.stop_reason is None
    assert second.token_ids.tolist() == [7, 8] and second.versions.tolist() == [3, 3]
    assert PackedDeltas.pack([]) is None


def test_news_come_together_deltas_before_ends_and_no_token_twice() -> None:
    outbox = Outbox()
    assert outbox.take(0.01) == (None, None)
    outbox.add(delta("a", 1))
    outbox.add(delta("b", 5))
    outbox.add(delta("a", 2))
    assert contents(outbox.take(1.0)[0]) == {"a": [1, 2], "b": [5]}
    outbox.add(delta("a", 3))
    outbox.add(delta("b", 6))
    outbox.add(completion("a", 1, 2, 3))
    packed, packed_ends = outbox.take(1.0)
    assert contents(packed) == {"a": [3], "b": [6]} and packed_ends is not None
    ends = packed_ends.unpack()
    assert isinstance(ends[0], Completion) and ends[0].token_ids.tolist() == [1, 2, 3]
    assert outbox.take(0.01) == (None, None)


def test_what_an_engine_raises_as_it_is_asked_is_told_to_those_who_asked() -> None:
    class Broken:
        def submit(self, requests: Sequence[Request], on_delta: Any) -> Any:
            raise ZeroDivisionError("a bug")

    replica = object.__new__(Replica)
    replica._engine, replica._outbox = Broken(), Outbox()  # type: ignore[assignment]
    replica.submit([Request(id=name, token_ids=np.ones(1, np.int32)) for name in "ab"])
    _, packed_ends = replica.news(1.0)
    assert packed_ends is not None
    (first, error), (second, _) = packed_ends.unpack()
    assert (first, second) == ("a", "b") and isinstance(error, EngineError) and "a bug" in str(error)


def test_a_worker_that_says_nothing_once_it_is_loaded_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[float] = []

    class Group:
        def facts(self) -> Any:
            raise StuckError("it says nothing")

        def close(self, *, timeout_s: float) -> None:
            closed.append(timeout_s)

    monkeypatch.setattr(Replica, "launch", lambda *args, **kwargs: Group())
    rest: Any = {"cluster": None, "placement": 0, "start_timeout_s": 1.0, "on_news": None, "on_death": None}
    with pytest.raises(StuckError):
        ReplicaProcess(PartConfig(type="any"), name="replica", **rest)
    assert closed == [0.0]


def test_ends_come_with_all_that_belongs_to_them_and_failures_beside_them() -> None:
    experts, error = np.ones((2, 1, 1), np.int16), EngineError("no")
    top = TopTokens(token_ids=np.array([[7], [8]]), logprobs=-np.ones((2, 1), np.float32))
    told: list[End] = [
        replace(completion("a", 1, 2), stop_reason=StopReason.STOP, stop_text="x", top=top),
        ("b", error),
        completion("c"),
        replace(completion("d", 3, 4), num_cached_tokens=16, routed_experts=experts),
    ]
    first, empty, last, failure = PackedEnds.pack(told).unpack()
    assert failure == ("b", error)
    assert isinstance(first, Completion) and isinstance(empty, Completion) and isinstance(last, Completion)
    assert (first.request_id, first.stop_reason, first.stop_text) == ("a", StopReason.STOP, "x")
    assert first.token_ids.tolist() == [1, 2] and first.num_cached_tokens == 0
    assert first.top is not None and first.top.token_ids.tolist() == [[7], [8]]
    assert (empty.request_id, len(empty.token_ids), empty.stop_reason) == ("c", 0, StopReason.LENGTH)
    assert last.token_ids.tolist() == [3, 4] and last.top is None and last.stop_text is None
    assert last.num_cached_tokens == 16 and last.routed_experts is experts
    assert PackedEnds.pack([("b", error)]).unpack() == [("b", error)]
