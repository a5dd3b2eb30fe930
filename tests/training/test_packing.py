"""Micro-batches and packs: budgets, evenness, prefix sharing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import InvalidSampleError
from rill.training.balance import CostModel, partition
from rill.training.packing import (
    PackSequence,
    build_pack,
    plan_micro_batches,
    plan_sharing_micro_batches,
)

CPU = torch.device("cpu")


def sequence(tokens: list[int], first_wanted: int, key: str | None = None) -> PackSequence:
    return PackSequence(
        token_ids=np.array(tokens, dtype=np.int32),
        wanted=np.arange(len(tokens)) >= max(1, first_wanted),
        share_key=key,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 400))
def test_every_sequence_lands_once_and_no_bin_is_over_budget(lengths: list[int], budget: int) -> None:
    bins = plan_micro_batches(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(load <= budget for load in loads)
    # Never more bins than first-fit's guarantee: two half-full ones would have been merged.
    assert len(bins) <= 2 * -(-sum(lengths) // budget) + 1


def test_bins_are_even_so_that_no_pass_is_a_leftover() -> None:
    lengths = list(np.random.default_rng(0).lognormal(5, 1, 200).astype(int) + 1)
    loads = [sum(lengths[i] for i in b) for b in plan_micro_batches(lengths, 8192)]
    assert max(loads) - min(loads) < 0.05 * max(loads)


def test_a_rank_that_could_do_with_fewer_passes_spreads_its_share() -> None:
    """A long tail lets some ranks pack tighter; filling up theirs would leave the others waiting in every pass."""
    cost = CostModel.of_transformer(num_parameters=1_500_000_000, num_layers=28, hidden_size=1536)
    for seed in (100, 101, 102):
        lengths = np.clip(np.random.default_rng(seed).lognormal(7.0, 0.8, 256), 16, 16_384).astype(int)
        shares = [lengths[part] for part in partition(cost(lengths), 8)]
        ideal = float(cost(lengths).sum()) / 8
        tight = [plan_micro_batches(list(share), 16_384) for share in shares]
        num_passes = max(map(len, tight))
        even = [plan_micro_batches(list(share), 16_384, at_least=num_passes) for share in shares]
        assert {len(bins) for bins in even} == {num_passes}
        assert time_of(even, shares, cost) <= min(1.05 * ideal, time_of(tight, shares, cost))


def time_of(plans: list[list[list[int]]], shares: list[np.ndarray], cost: CostModel) -> float:
    """Ranks meet in every pass: each costs what its longest does."""
    passes = [
        [float(cost(share[bin_]).sum()) for bin_ in bins] for bins, share in zip(plans, shares, strict=True)
    ]
    return sum(max(column) for column in itertools.zip_longest(*passes, fillvalue=0.0))


def test_a_sequence_over_the_budget_names_both_numbers() -> None:
    with pytest.raises(InvalidSampleError, match=r"11 tokens .* 10"):
        plan_micro_batches([3, 11], 10)


def test_positions_restart_and_sources_are_the_tokens_before() -> None:
    pack = build_pack(
        [sequence([5, 6, 7], 2), sequence([8, 9], 1)], device=CPU, use_flash=False, share_prefixes=False
    )
    assert pack.input_ids_1M.tolist() == [[5, 6, 7, 8, 9]]
    assert pack.position_ids_1M.tolist() == [[0, 1, 2, 0, 1]]
    assert pack.layout.cu_queries.tolist() == [0, 3, 5]
    assert pack.source_K.tolist() == [1, 3] and pack.target_K.tolist() == [7, 9]
    assert pack.seq_K.tolist() == [0, 1] and pack.last_S.tolist() == [2, 4]


def test_a_shared_prompt_is_stored_once_and_predicts_every_first_answer_token() -> None:
    group = [sequence([1, 2, 3, 10, 11], 3, "g"), sequence([1, 2, 3, 20], 3, "g"), sequence([1, 9], 1, "h")]
    pack = build_pack(group, device=CPU, use_flash=False, share_prefixes=True)
    assert pack.input_ids_1M.tolist() == [[1, 2, 3, 10, 11, 20, 1, 9]]
    assert pack.position_ids_1M.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert pack.target_K.tolist() == [10, 11, 20, 9]
    assert pack.source_K.tolist() == [2, 3, 2, 6]
    assert (pack.num_row_tokens, pack.num_sequence_tokens) == (8, 11)


def test_sharing_ends_before_the_first_difference_and_the_first_trained_token() -> None:
    differing = [sequence([1, 2, 3, 4], 3, "g"), sequence([1, 7, 3, 4], 3, "g")]
    assert build_pack(differing, device=CPU, use_flash=False, share_prefixes=True).num_row_tokens == 7
    trained = [sequence([1, 2, 3, 4], 1, "g"), sequence([1, 2, 3, 4], 3, "g")]
    assert build_pack(trained, device=CPU, use_flash=False, share_prefixes=True).num_row_tokens == 7


def test_planning_with_sharing_keeps_families_together_and_counts_the_prefix_once() -> None:
    family = [sequence([1] * 50 + [i], 50, "g") for i in range(8)]
    bins = plan_sharing_micro_batches(family, 60)
    assert bins == [list(range(8))]
    assert len(plan_micro_batches([s.num_tokens for s in family], 60)) == 8
