"""A reward model adds its score to every reward, wherever it runs, and advantages follow it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.errors import ModelError
from rill.models.loading import ModelConfig
from rill.training.preference import RewardTrainer
from rill.training.reward import CLASSIFIER_HEAD, RewardModel
from rill.types import NOT_SAMPLED, Sample, Trajectory
from rill.workers.scorers import PART, RewardModelConfig, with_scores
from tests.e2e.tiny import RECIPE, resolved
from tests.workflows.scene import MODEL

SEQUENCES = [np.array(tokens, np.int32) for tokens in ([5, 6, 7], [8, 9], [5, 6, 7, 8, 9, 10])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a preference of some kind."""
    place = tmp_path_factory.mktemp("reward") / "model"
    trainer = RewardTrainer(RewardTrainer.Config(model=MODEL))
    with torch.no_grad():
        trainer.engine.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    trainer.export(place)
    trainer.close()
    return place


def model_at(place: Path) -> RewardModel:
    return RewardModel(RewardModel.Config(model=ModelConfig(path=str(place))))


def test_it_scores_as_its_trainer_did(folder: Path) -> None:
    trainer = RewardTrainer(RewardTrainer.Config(model=ModelConfig(path=str(folder))))
    scores = model_at(folder).scores(SEQUENCES)
    assert scores == pytest.approx(trainer.score(SEQUENCES), abs=1e-6)
    assert len(set(scores)) == len(SEQUENCES)
    trainer.close()


def test_a_sequence_classifier_of_transformers_scores_the_same_here(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    shape = {**MODEL.shape, "num_labels": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    theirs = Qwen2ForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        expected = [theirs(torch.from_numpy(s).long()[None]).logits.item() for s in SEQUENCES]
    assert model_at(tmp_path / "classifier").scores(SEQUENCES) == pytest.approx(expected, abs=1e-5)


def test_a_folder_without_a_head_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "headless"
    place.mkdir()
    for file in folder.iterdir():
        if file.name != "value_head.safetensors":
            (place / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="no head to score with"):
        model_at(place)
    weights = load_file(place / "model.safetensors")
    save_file({**weights, CLASSIFIER_HEAD: torch.zeros(3, 16)}, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="one label"):
        model_at(place)


def sample(group: str, number: int, reward: float) -> Sample:
    trajectory = Trajectory(
        id=f"{group}/{number}",
        group_id=group,
        prompt_id=group,
        token_ids=np.arange(4, dtype=np.int32),
        logprobs=np.zeros(4, np.float32),
        versions=np.array([NOT_SAMPLED, 1, 1, 1], np.int32),
        loss_mask=np.array([False, True, True, True]),
        turn_ids=np.zeros(4, np.int32),
        reward=reward,
        reward_parts={"exact": reward},
    )
    return Sample(trajectory=trajectory, advantages=np.zeros(4, np.float32))


def test_scores_are_added_and_advantages_follow_within_each_group() -> None:
    algorithm = Algorithm(AlgorithmConfig(type="grpo"))
    samples = [sample("a", 0, 1.0), sample("b", 0, 0.0), sample("a", 1, 0.0), sample("b", 1, 0.0)]
    config = RewardModelConfig(model=MODEL, weight=0.5)
    rewarded = with_scores(samples, [1.0, 2.0, 3.0, 4.0], config, algorithm)
    assert [s.trajectory.reward for s in rewarded] == [1.5, 1.0, 1.5, 2.0]
    assert [s.trajectory.reward_parts[PART] for s in rewarded] == [1.0, 2.0, 3.0, 4.0]
    assert np.all(rewarded[0].advantages == 0) and np.all(rewarded[2].advantages == 0), (
        "equal rewards teach nothing"
    )
    expected = algorithm.group_advantages([1.0, 2.0], [3, 3])
    for member, advantage in zip((rewarded[1], rewarded[3]), expected, strict=True):
        np.testing.assert_array_equal(
            member.advantages, np.array([0, 1, 1, 1], np.float32) * np.float32(advantage)
        )


def test_a_model_that_replaces_the_reward_leaves_the_environments_reward_to_reports() -> None:
    algorithm = Algorithm(AlgorithmConfig(type="grpo"))
    config = RewardModelConfig(model=MODEL, weight=2.0, replaces_reward=True)
    rewarded = with_scores([sample("a", 0, 1.0), sample("a", 1, 0.0)], [0.5, 1.5], config, algorithm)
    assert [s.trajectory.reward for s in rewarded] == [1.0, 3.0]
    assert [s.trajectory.reward_parts for s in rewarded] == [
        {"exact": 1.0, PART: 0.5},
        {"exact": 0.0, PART: 1.5},
    ]
    assert rewarded[0].advantages[1] < 0 < rewarded[1].advantages[1]


def test_a_model_that_replaces_the_reward_replaces_what_was_given_by_turn() -> None:
    algorithm = Algorithm(AlgorithmConfig.model_validate("return_to_go"))
    samples = []
    for member in (sample("a", 0, 1.0), sample("a", 1, 1.0)):
        given = {"turn_ids": np.array([0, 1, 2, 2], np.int32), "rewards": np.array([0, 1, 0, 0], np.float32)}
        samples.append(replace(member, trajectory=replace(member.trajectory, **given)))
    config = RewardModelConfig(model=MODEL, replaces_reward=True)
    first, second = with_scores(samples, [0.5, 1.5], config, algorithm)
    assert first.advantages.tolist() == [0, -1, -1, -1] and second.advantages.tolist() == [0, 1, 1, 1]
    first, second = with_scores(samples, [0.5, 1.5], RewardModelConfig(model=MODEL), algorithm)
    assert first.advantages.tolist() == [0, -1, -2, -2], "beside it: 1 came before the second turn"


def test_an_answer_too_long_to_be_scored_is_in_no_baseline_and_in_no_loss() -> None:
    """Where on_too_long is "skip"; it is no reason to end the run."""
    algorithm = Algorithm(AlgorithmConfig(type="grpo"))
    samples = [sample("a", number, 0.0) for number in range(3)]
    rewarded = with_scores(samples, [1.0, float("nan"), 3.0], RewardModelConfig(model=MODEL), algorithm)
    assert [s.trajectory.error is None for s in rewarded] == [True, False, True]
    expected = algorithm.group_advantages([1.0, 3.0], [3, 3])
    assert [rewarded[0].advantages[1], rewarded[2].advantages[1]] == pytest.approx(expected)
    assert not rewarded[1].trajectory.loss_mask.any() and not rewarded[1].advantages.any()


def test_rules_that_decide_before_the_model_scores_are_refused() -> None:
    model = "reward_model.model.path=anywhere"
    with pytest.raises(Exception, match="leave drop_equal_rewards"):
        resolved(RECIPE, [model, "algorithm.filters.drop_equal_rewards=true"])
    with pytest.raises(Exception, match="greedy answer"):
        resolved(RECIPE, [model, "algorithm.type=remax"])


def test_an_episode_of_several_samples_has_the_score_of_its_last_on_all_of_them() -> None:
    """As the environment's reward is that of the last answer: the samples before it led to it."""
    algorithm = Algorithm(AlgorithmConfig(type="dr_grpo"))
    samples = []
    for number, episode in ((0, "e"), (1, "e"), (2, "f")):
        member = sample("a", number, 0.0)
        samples.append(replace(member, trajectory=replace(member.trajectory, episode_id=episode)))
    config = RewardModelConfig(model=MODEL)
    rewarded = with_scores(samples, [9.0, 1.0, 3.0], config, algorithm)
    assert [s.trajectory.reward for s in rewarded] == [1.0, 1.0, 3.0]
    assert [s.advantages[1] for s in rewarded] == [-1.0, -1.0, 1.0]
    one_too_long = with_scores(samples, [9.0, float("nan"), 3.0], config, algorithm)
    assert [s.trajectory.error is None for s in one_too_long] == [False, False, True]
