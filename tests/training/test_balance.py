import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import InvalidSampleError, PlanError
from rill.training.balance import CostModel, imbalance, micro_batches, pack, partition

lengths_lists = st.lists(st.integers(1, 100), min_size=0, max_size=40)


def log_normal(count, seed=0, longest=16_384):
    lengths = np.random.default_rng(seed).lognormal(7.0, 0.8, count)
    return np.clip(lengths, 16, longest).astype(int).tolist()


@settings(max_examples=80, deadline=None)
@given(costs=st.lists(st.floats(0, 1e6), max_size=40), num_ranks=st.integers(1, 9))
def test_every_sample_goes_to_exactly_one_rank(costs, num_ranks):
    parts = partition(costs, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert parts == partition(costs, num_ranks)


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=40), num_ranks=st.integers(2, 6))
def test_no_rank_is_worse_than_greedy_allows(costs, num_ranks):
    """Longest-first is within 4/3 of the best; the costliest sample and the mean bound the best from below."""
    totals = [sum(costs[i] for i in part) for part in partition(costs, num_ranks)]
    bound = max(max(costs), sum(costs) / num_ranks)
    assert max(totals) <= bound + max(costs) * (1 - 1 / num_ranks) + 1e-6


def test_small_splits_are_as_good_as_the_best_of_all():
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(25):
        costs = rng.integers(1, 30, 8).astype(float)
        best = min(
            max(sum(c for c, r in zip(costs, ranks) if r == k) for k in range(3))
            for ranks in itertools.product(range(3), repeat=8)
        )
        found = max(costs[part].sum() for part in partition(costs, 3))
        worst = max(worst, found / best)
    assert worst <= 1.08


@settings(max_examples=60, deadline=None)
@given(per_rank=st.integers(0, 6), num_ranks=st.integers(1, 6), seed=st.integers(0, 999))
def test_equal_counts_are_equal(per_rank, num_ranks, seed):
    costs = np.random.default_rng(seed).random(per_rank * num_ranks)
    parts = partition(costs, num_ranks, equal_size=True)
    assert {len(part) for part in parts} == {per_rank}
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_log_normal_lengths_are_balanced_within_3_percent(equal_size, seed):
    costs = CostModel(linear=1.0, quadratic=1e-4)(log_normal(4096, seed))
    assert imbalance(costs, partition(costs, 64, equal_size)) < 0.03
    few = CostModel()(log_normal(256, seed, longest=4096))
    assert imbalance(few, partition(few, 8, equal_size)) < 0.03


def test_a_large_split_is_quick():
    """50 ms on a quiet machine (benchmarks/balance.py); here only that it is not quadratic."""
    costs = CostModel()(log_normal(4096))
    start_s = time.perf_counter()
    partition(costs, 64)
    assert time.perf_counter() - start_s < 1.0


@settings(max_examples=80, deadline=None)
@given(lengths=lengths_lists, budget=st.integers(100, 300))
def test_packing_keeps_the_budget_and_every_sequence(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in members) <= budget for members in bins)
    fewest = -(-sum(lengths) // budget)
    assert len(bins) <= max(2 * fewest, fewest + 1)  # two half-empty bins would have been one


@settings(max_examples=80, deadline=None)
@given(lengths=lengths_lists, num_ranks=st.integers(1, 5), budget=st.integers(100, 250))
def test_all_ranks_have_the_same_number_of_micro_batches(lengths, num_ranks, budget):
    plan = micro_batches(lengths, num_ranks, budget, cost=CostModel(linear=1.0, quadratic=0.01))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(len(lengths)))
    for rank in plan:
        assert all(sum(lengths[i] for i in members) <= budget for members in rank)
        filled = [bool(members) for members in rank]
        assert filled == sorted(filled, reverse=True)
        if not all(filled):  # padded only where the rank has too few sequences
            assert all(len(members) <= 1 for members in rank)


def test_micro_batches_that_meet_in_a_collective_cost_alike():
    lengths = log_normal(512, seed=3, longest=4096)
    cost = CostModel(linear=1.0, quadratic=1e-5)
    plan = micro_batches(lengths, 8, 16_384, cost=cost)
    waits = 0.0
    for column in zip(*plan):
        costs = [float(cost([lengths[i] for i in members]).sum()) for members in column]
        waits += max(costs)
    assert waits < 1.05 * float(cost(lengths).sum()) / 8


def test_a_rank_that_needs_fewer_micro_batches_spreads_its_share():
    """A long tail lets some ranks pack tighter; filling up theirs would leave the others waiting in every pass."""
    cost = CostModel.of_transformer(num_parameters=1_500_000_000, num_layers=28, hidden_size=1536)
    for seed in (100, 101, 102):
        lengths = log_normal(256, seed)
        plan = micro_batches(lengths, 8, 16_384, cost=cost)
        waits = sum(max(float(cost([lengths[i] for i in m]).sum()) for m in column) for column in zip(*plan))
        assert waits < 1.02 * float(cost(lengths).sum()) / 8


def test_a_sequence_over_the_budget_is_named():
    with pytest.raises(
        InvalidSampleError, match="sequence maze-7 has 101 tokens, the micro-batch budget is 100"
    ):
        pack([5, 101], 100, ids=["maze-6", "maze-7"])
    with pytest.raises(InvalidSampleError, match="number 1 has 0 tokens"):
        micro_batches([5, 0], 2, 100)


def test_nonsense_is_refused():
    with pytest.raises(PlanError, match="3 samples do not divide over 2 ranks"):
        partition([1, 2, 3], 2, equal_size=True)
    with pytest.raises(PlanError, match="0 ranks"):
        partition([1.0], 0)
    with pytest.raises(InvalidSampleError, match="finite"):
        partition([1.0, float("nan")], 2)


def test_nothing_to_split_is_nothing_for_everyone():
    assert partition([], 3) == [[], [], []]
    assert pack([], 10) == []
    assert micro_batches([], 2, 10) == [[], []]


def test_attention_makes_long_sequences_dear():
    cost = CostModel.of_transformer(num_parameters=1_000, num_layers=2, hidden_size=16)
    one_long, four_short = cost([400]).sum(), cost([100] * 4).sum()
    assert one_long > four_short
    assert cost([100]).tolist() == [6.0 * 1_000 * 100 + 6.0 * 2 * 16 * 100**2]
