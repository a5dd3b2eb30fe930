"""Reference and teacher models, and distillation over the whole vocabulary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rill.errors import ConfigError, TrainingError, WeightSyncError
from rill.models.loading import ModelConfig, load_model
from rill.training.policy import PolicyTrainer
from rill.training.score import ScoreModel
from tests.training.tiny import MODEL, SHAPE, algorithm, config, make_samples, trainer

TEACHER = ModelConfig(shape={**SHAPE, "hidden_size": 48, "num_hidden_layers": 1}, seed=7)


def test_a_reference_of_the_same_weights_computes_what_the_trainer_computes() -> None:
    reference, t, samples = ScoreModel(ScoreModel.Config(model=MODEL)), trainer(), make_samples()
    for trained_only in (False, True):
        found = reference.logprobs(samples, trained_only=trained_only)
        for a, b in zip(found, t.logprobs(samples, trained_only=trained_only), strict=True):
            np.testing.assert_array_equal(a, b)
    t.update(samples)
    assert not np.array_equal(reference.logprobs(samples)[0], t.logprobs(samples)[0])
    reference.load_weights(t.named_weights())
    np.testing.assert_array_equal(reference.logprobs(samples)[0], t.logprobs(samples)[0])


def test_weights_that_are_missing_or_foreign_are_refused() -> None:
    reference = ScoreModel(ScoreModel.Config(model=MODEL))
    with pytest.raises(WeightSyncError, match="were not given"):
        reference.load_weights([])
    with pytest.raises(WeightSyncError, match="does not belong"):
        reference.load_weights([("nothing", torch.zeros(1))])


def distilling(**values: object) -> PolicyTrainer:
    options = {"coefficient": 0.5, "form": "full_vocabulary"}
    return PolicyTrainer(config(**values), algorithm(distillation=options))


def test_distillation_over_the_vocabulary_has_the_gradient_of_the_plain_kl() -> None:
    samples = make_samples()
    t = distilling(micro_batch_tokens=48)
    t.set_teachers([(ScoreModel(ScoreModel.Config(model=TEACHER)), 1.0)])
    t.begin()
    t.accumulate(samples)
    found = {n.removeprefix("lm."): g for n, g in t.engine.gradients().items()}
    student, teacher = (load_model(m, dtype=torch.float32) for m in (MODEL, TEACHER))
    for sample in samples:
        ids = torch.tensor(sample.trajectory.token_ids).long()
        mask = torch.tensor(sample.trajectory.loss_mask[1:])
        logp = student(ids[None]).logits[0, :-1].log_softmax(-1)
        logq = teacher(ids[None]).logits[0, :-1].log_softmax(-1).detach()
        chosen = logp.gather(-1, ids[1:, None])[:, 0]
        policy = -(chosen - chosen.detach()).exp() * torch.tensor(sample.advantages[1:])
        kl = (logp.exp() * (logp - logq)).sum(-1)
        (policy + 0.5 * kl)[mask].sum().backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-3, rtol=2e-3, msg=name)
    assert t.finish()["distillation/kl"] > 0


def test_a_student_comes_nearer_to_its_teacher() -> None:
    samples = [dataclasses.replace(s, advantages=np.zeros_like(s.advantages)) for s in make_samples()]
    t = distilling(optimizer={"learning_rate": 5e-3})
    t.set_teachers([(ScoreModel(ScoreModel.Config(model=TEACHER)), 1.0)])
    kls = [t.update(samples)["distillation/kl"] for _ in range(8)]
    assert kls[-1] < 0.8 * kls[0]


def test_teachers_where_none_are_needed_and_none_where_they_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="full_vocabulary"):
        trainer().set_teachers([])
    with pytest.raises(TrainingError, match="set_teachers"):
        distilling().update(make_samples())
