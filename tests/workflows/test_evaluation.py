from __future__ import annotations

import itertools

import pytest

from rill.data.tasks.arithmetic import ArithmeticDataset
from rill.telemetry.pass_at_k import pass_at_k, pass_counts
from rill.workers.config import HELD_OUT
from rill.workers.records import TRAIN
from rill.workflows.config import EvalConfig
from rill.workflows.evaluation import Evaluation, read_prompts, summarise_rewards


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


def test_an_episode_that_failed_is_counted_and_is_not_right() -> None:
    metrics = summarise_rewards([[1.0], [float("nan")]], "gsm8k")
    assert (metrics["eval/gsm8k/accuracy"], metrics["eval/gsm8k/errors"]) == (0.5, 0.5)
    assert metrics["eval/gsm8k/reward"] == 1.0


def test_a_run_may_have_several_sets_each_with_a_name_of_its_own() -> None:
    data = ArithmeticDataset.Config()
    config = EvalConfig.model_validate(
        {"num_prompts": 8, "sets": [{"name": "hard", "data": {"type": "arithmetic", "digits": [3, 3]}}]}
    )
    sets = config.all_sets(data)
    assert list(sets) == [HELD_OUT, "hard"]
    assert (sets[HELD_OUT].num_prompts, sets["hard"].num_prompts) == (8, 128)
    assert len(read_prompts(sets["hard"])) == 128
    with pytest.raises(ValueError, match="a name of its own"):
        EvalConfig.model_validate({"sets": [{"name": "a", "data": "arithmetic"}] * 2})


def test_a_set_without_prompts_is_none_and_no_evaluation_that_never_ends() -> None:
    config = EvalConfig.model_validate(
        {"num_prompts": 0, "sets": [{"name": "a", "data": "arithmetic", "num_prompts": 0}]}
    )
    assert config.all_sets(ArithmeticDataset.Config()) == {}


def test_a_set_may_be_called_train_and_is_not_trained_on() -> None:
    config = EvalConfig.model_validate(
        {"num_prompts": 0, "sets": [{"name": "train", "data": "arithmetic", "num_prompts": 2}]}
    )
    tasks = Evaluation(config.all_sets(ArithmeticDataset.Config())).begin(0)
    assert [task.id for task in tasks] == ["train/0", "train/1"]
    assert all(task.purpose != TRAIN for task in tasks)
