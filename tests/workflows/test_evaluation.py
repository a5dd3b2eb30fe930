from __future__ import annotations

import itertools
from typing import cast

import pytest

from rill.workflows.evaluation import Evaluator, pass_at_k, pass_counts, summarise_rewards
from rill.workflows.fleet import Fleet
from rill.workflows.sections import EvalConfig


def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_answer() -> None:
    row = [1.0, 0.0, 0.0, 1.0, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(row, k))
        assert pass_at_k([row], k).mean == pytest.approx(sum(max(s) for s in subsets) / len(subsets))


def test_one_sample_a_prompt_gives_a_wilson_interval() -> None:
    estimate = pass_at_k([[1.0]] * 8 + [[0.0]] * 2, 1)
    assert (estimate.mean, round(estimate.low, 3), round(estimate.high, 3)) == (0.8, 0.49, 0.943)


def test_the_interval_of_a_perfect_score_still_has_a_width() -> None:
    assert pass_at_k([[1.0]] * 20, 1).low < 1.0


def test_a_partial_reward_is_not_a_right_answer() -> None:
    assert summarise_rewards([[0.5], [1.0]])["eval/accuracy"] == 0.5


def test_k_doubles_up_to_the_number_of_samples() -> None:
    assert pass_counts(1) == [1]
    assert pass_counts(6) == [1, 2, 4, 6]
    assert pass_counts(8) == [1, 2, 4, 8]


def test_several_samples_that_would_be_the_same_are_refused_with_the_recipe() -> None:
    with pytest.raises(ValueError, match="same answer every time"):
        EvalConfig(samples=4)


def test_without_prompts_there_is_no_evaluation() -> None:
    no_fleet = cast(Fleet, None)
    assert Evaluator(EvalConfig(num_prompts=0), no_fleet, [], timeout_s=1.0).run() == {}
