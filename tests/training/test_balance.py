import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import InvalidSampleError, PlanError
from rill.training.balance import CostModel, imbalance, partition


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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_log_normal_lengths_are_balanced_within_3_percent(seed):
    costs = CostModel(linear=1.0, quadratic=1e-4)(log_normal(4096, seed))
    assert imbalance(costs, partition(costs, 64)) < 0.03
    few = CostModel()(log_normal(256, seed, longest=4096))
    assert imbalance(few, partition(few, 8)) < 0.03


def test_a_large_split_is_quick():
    """50 ms on a quiet machine (benchmarks/balance.py); here only that it is not quadratic."""
    costs = CostModel()(log_normal(4096))
    start_s = time.thread_time()
    partition(costs, 64)
    assert time.thread_time() - start_s < 1.0


def test_nonsense_is_refused():
    with pytest.raises(PlanError, match="0 ranks"):
        partition([1.0], 0)
    with pytest.raises(InvalidSampleError, match="finite"):
        partition([1.0, float("nan")], 2)


def test_nothing_to_split_is_nothing_for_everyone():
    assert partition([], 3) == [[], [], []]


def test_attention_makes_long_sequences_dear():
    cost = CostModel.of_transformer(num_parameters=1_000, num_layers=2, hidden_size=16)
    one_long, four_short = cost([400]).sum(), cost([100] * 4).sum()
    assert one_long > four_short
    assert cost([100]).tolist() == [6.0 * 1_000 * 100 + 6.0 * 2 * 16 * 100**2]
