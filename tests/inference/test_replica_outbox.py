"""A replica's reports on their way to the parent: packed, in order, first tokens and ends at once."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np

from rill.inference import replica_outbox
from rill.inference.base import Completion, Delta
from rill.inference.replica_outbox import Outbox, PackedDeltas
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
    return {} if packed is None else {d.request_id: d.token_ids.tolist() for d in packed.unpack()}


def test_packing_keeps_every_token_with_its_request() -> None:
    packed = PackedDeltas.pack([delta("a", 1), delta("b", 7, 8), delta("a", 2, 3, reason=StopReason.EOS)])
    assert packed is not None
    first, second = packed.unpack()
    assert first.token_ids.tolist() == [1, 2, 3] and first.logprobs.tolist() == [-1, -2, -3]
    assert first.stop_reason is StopReason.EOS and second.stop_reason is None
    assert second.token_ids.tolist() == [7, 8] and second.versions.tolist() == [3, 3]
    assert PackedDeltas.pack([]) is None


def test_a_streams_first_token_and_every_end_go_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(replica_outbox, "_STREAM_WAIT_S", 0.5)
    here, there = multiprocessing.Pipe()
    outbox = Outbox(there)
    outbox.add_streamed(delta("a", 1))
    assert here.poll(0.3) and contents(here.recv()[1]) == {"a": [1]}
    outbox.add_streamed(delta("a", 2))
    outbox.add_streamed(delta("a", 3))
    assert not here.poll(0.1), "later tokens wait for company"
    outbox.add_end(completion("a", 1, 2, 3))
    assert here.poll(0.3)
    _, packed, ends = here.recv()
    assert contents(packed) == {"a": [2, 3]} and ends[0].token_ids.tolist() == [1, 2, 3]


def test_recorded_tokens_of_a_request_that_ended_do_not_travel_afterwards(monkeypatch: Any) -> None:
    monkeypatch.setattr(replica_outbox, "RECORD_WAIT_S", 0.3)
    here, there = multiprocessing.Pipe()
    outbox = Outbox(there)
    outbox.add_recorded(delta("a", 1))
    assert here.poll(1.0) and contents(here.recv()[1]) == {"a": [1]}
    outbox.add_recorded(delta("a", 2))
    outbox.add_recorded(delta("b", 5))
    outbox.add_end(completion("a", 1, 2))
    assert here.poll(0.2) and contents(here.recv()[1]) == {}
    assert here.poll(1.0) and contents(here.recv()[1]) == {"b": [5]}
    time.sleep(0.05)
    assert not here.poll(0)
