"""A chunk: the same shares for every rank, from a few columns. Answers: each to who asked, and their end to all."""

from __future__ import annotations

import pickle
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import PeerDiedError, RunError
from rill.training.balance import CostModel
from rill.workers.records import BY_TOKENS, Answers, Chunk, Outcome, group_id, sample_key

OUTCOMES = st.lists(
    st.tuples(st.integers(0, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=5)),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[0],
)


def chunk_of(rows: list[tuple[int, list[int]]]) -> tuple[Chunk, list[Outcome]]:
    outcomes = [Outcome(index=index, lengths=tuple(lengths)) for index, lengths in rows]
    return Chunk.of(outcomes, step=3, number=0, is_last=True), outcomes


@settings(max_examples=30)
@given(rows=OUTCOMES, num_ranks=st.integers(1, 5), whole_groups=st.booleans())
def test_every_sample_belongs_to_one_rank_in_batch_order(
    rows: list[tuple[int, list[int]]], num_ranks: int, whole_groups: bool
) -> None:
    chunk, outcomes = chunk_of(rows)
    chunk = pickle.loads(pickle.dumps(chunk))
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    expected = [sample_key(group_id(o.index), i) for o in ordered for i in range(len(o.lengths))]
    shares = [
        chunk.share(rank, num_ranks, whole_groups=whole_groups, cost=BY_TOKENS) for rank in range(num_ranks)
    ]
    assert sorted(key for share in shares for key in share) == sorted(expected)
    for share in shares:
        assert share == [key for key in expected if key in set(share)]
        if whole_groups:
            groups = {key.partition("/")[0] for key in share}
            assert len(share) == sum(len(o.lengths) for o in outcomes if group_id(o.index) in groups)
    assert chunk.keys_S == expected


def test_shares_follow_the_cost_of_attention_where_the_trainer_says_so() -> None:
    chunk, _ = chunk_of([(0, [8000]), (1, [2000] * 4)])
    by_tokens = [len(chunk.share(rank, 2, whole_groups=False, cost=BY_TOKENS)) for rank in range(2)]
    long_is_dear = CostModel(linear=1.0, quadratic=1.0)
    by_cost = [len(chunk.share(rank, 2, whole_groups=False, cost=long_is_dear)) for rank in range(2)]
    assert sorted(by_tokens) == [1, 4] and sorted(by_cost) == [1, 4]
    chunk, _ = chunk_of([(0, [8000]), (1, [2000] * 6)])
    by_tokens = [len(chunk.share(rank, 2, whole_groups=False, cost=BY_TOKENS)) for rank in range(2)]
    by_cost = [len(chunk.share(rank, 2, whole_groups=False, cost=long_is_dear)) for rank in range(2)]
    assert sorted(by_tokens) == [2, 5] and sorted(by_cost) == [1, 6]


class Line:
    """A channel: what is put is an answer, or why there is none any more."""

    name = "answers[0]"

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take(self) -> Any:
        item = self.items.get()
        if isinstance(item, Exception):
            raise item
        return item


def test_who_waits_for_an_answer_is_told_when_none_can_come_any_more() -> None:
    line = Line()
    answers: Answers[Any] = Answers(line)  # type: ignore[arg-type]
    names = ("unwanted", "first", "unwanted too", "second")
    unwanted, first, unwanted_too, second = map(answers.expect, names)
    unwanted.cancel()
    unwanted_too.cancel()
    for name in ("unwanted", "first", "first"):
        line.items.put(SimpleNamespace(request_id=name))
    assert first.result(5).request_id == "first"
    line.items.put(PeerDiedError("payload engine.3 is gone with its owner"))
    with pytest.raises(RunError, match="answers\\[0\\]: no answer can be read .* payload engine.3 is gone"):
        second.result(5)
    with pytest.raises(RunError, match="payload engine.3 is gone"):
        answers.expect("third")
