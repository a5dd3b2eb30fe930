"""A step's plan: the same shares for every rank, from a few columns."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rill.training.balance import CostModel
from rill.types import PolicyVersion
from rill.workflows.jobs import Outcome, StepPlan

OUTCOMES = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=5), st.sampled_from("ab")
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[0],
)


def plan_of(rows: list[tuple[int, list[int], str]]) -> tuple[StepPlan, list[Outcome]]:
    outcomes = [Outcome(index=index, lengths=tuple(lengths), maker=maker) for index, lengths, maker in rows]
    return StepPlan.of(outcomes, step=3, version=PolicyVersion(4)), outcomes


@given(rows=OUTCOMES, num_ranks=st.integers(1, 5), whole_groups=st.booleans())
def test_every_sample_belongs_to_one_rank_in_batch_order(
    rows: list[tuple[int, list[int], str]], num_ranks: int, whole_groups: bool
) -> None:
    plan, outcomes = plan_of(rows)
    plan = pickle.loads(pickle.dumps(plan))
    expected = [key for outcome in sorted(outcomes, key=lambda o: o.index) for key in outcome.keys]
    shares = [plan.share(rank, num_ranks, whole_groups=whole_groups) for rank in range(num_ranks)]
    assert sorted(key for share in shares for key in share) == sorted(expected)
    for share in shares:
        assert share == [key for key in expected if key in set(share)]
        if whole_groups:
            groups = {key.partition("/")[0] for key in share}
            assert len(share) == sum(len(o.lengths) for o in outcomes if o.group_id in groups)
    assert (plan.num_samples, plan.num_tokens) == (len(expected), sum(sum(o.lengths) for o in outcomes))


@pytest.mark.parametrize("num_groups", [8, 512])
def test_what_passes_the_driver_grows_by_bytes_and_not_by_objects(num_groups: int) -> None:
    plan, _ = plan_of([(index, [100] * 8, "rollout[0]#0") for index in range(num_groups)])
    assert isinstance(plan.content, bytes)
    assert len(pickle.dumps(plan)) < 1000 + 48 * num_groups


def test_shares_follow_the_cost_of_attention_where_the_trainer_says_so() -> None:
    plan, _ = plan_of([(0, [8000], "a"), (1, [2000] * 4, "a")])
    by_tokens = [len(plan.share(rank, 2, whole_groups=False)) for rank in range(2)]
    long_is_dear = CostModel(linear=1.0, quadratic=1.0)
    by_cost = [len(plan.share(rank, 2, whole_groups=False, cost=long_is_dear)) for rank in range(2)]
    assert sorted(by_tokens) == [1, 4] and sorted(by_cost) == [1, 4]
    plan, _ = plan_of([(0, [8000], "a"), (1, [2000] * 6, "a")])
    by_tokens = [len(plan.share(rank, 2, whole_groups=False)) for rank in range(2)]
    by_cost = [len(plan.share(rank, 2, whole_groups=False, cost=long_is_dear)) for rank in range(2)]
    assert sorted(by_tokens) == [2, 5] and sorted(by_cost) == [1, 6]
