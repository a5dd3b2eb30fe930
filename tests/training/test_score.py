"""Reference and teacher models, and distillation over the whole vocabulary."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import ConfigError, InvalidSampleError, TrainingError, WeightSyncError
from rill.models.loading import ModelConfig, load_model
from rill.models.routing import expert_blocks
from rill.training.module import ValueModule
from rill.training.parallel import Rendezvous
from rill.training.policy import PolicyTrainer
from rill.training.score import FrozenModel, ScoreModel, sequence_scores
from tests.models.test_routing import SHAPES as ROUTED
from tests.training.tiny import MODEL, SHAPE, VOCAB, algorithm, config, make_samples, run_ranks, trainer

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


def test_a_model_with_biased_routers_follows_the_policy_too() -> None:
    """Their biases are buffers, and come with the weights."""
    shape = ROUTED["deepseek_v3"] | {"model_type": "deepseek_v3", "vocab_size": VOCAB}
    model = {"shape": shape}
    t, follower = trainer(model=model), ScoreModel(ScoreModel.Config(model=ModelConfig.model_validate(model)))
    (block,) = expert_blocks(t.engine.module.lm)
    block.gate.e_score_correction_bias.copy_(torch.linspace(-5, 5, 8))
    samples = make_samples(4)
    follower.load_weights(t.named_weights())
    for wanted, found in zip(t.logprobs(samples), follower.logprobs(samples), strict=True):
        np.testing.assert_array_equal(found, wanted)


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


# --- what follows the trainer -----------------------------------------------------------------------------


def test_what_a_recipe_leaves_unset_follows_the_trainer() -> None:
    theirs = config(compute_dtype="bfloat16", micro_batch_tokens=77, on_too_long="skip")
    followed = ScoreModel.Config(model=MODEL).following(theirs)
    assert (followed.dtype, followed.micro_batch_tokens, followed.on_too_long) == ("bfloat16", 77, "skip")
    own = ScoreModel.Config(model=MODEL, dtype="float32", micro_batch_tokens=99).following(theirs)
    assert (own.dtype, own.micro_batch_tokens, own.compile) == ("float32", 99, False)


@pytest.mark.parametrize("values", [{"quantization_aware": "int4"}, {"fp8": True}], ids=str)
def test_the_trainers_model_is_rounded_as_it_rounds_and_a_teacher_is_not(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    assert getattr(ScoreModel.Config(model=MODEL).following(config(**values)), name) == value
    assert not getattr(ScoreModel.Config(model=TEACHER).following(config(**values)), name)
    assert getattr(ScoreModel.Config(model=TEACHER, **values).following(config()), name) == value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kl_to_the_reference_is_exactly_0_at_the_first_step(dtype: str) -> None:
    values: dict[str, Any] = {"compute_dtype": dtype, "micro_batch_tokens": 64}
    t = PolicyTrainer(config(**values), algorithm(kl={"coefficient": 0.1}))
    reference = ScoreModel(ScoreModel.Config(model=MODEL).following(t.config))
    samples = make_samples()
    scored = [
        dataclasses.replace(s, ref_logprobs=x)
        for s, x in zip(samples, reference.logprobs(samples, trained_only=True), strict=True)
    ]
    assert t.update(scored)["policy/kl_ref"] == 0.0


def test_sequences_too_long_to_train_on_are_skipped_by_all_that_score_them() -> None:
    samples = make_samples()
    longest = max(s.num_tokens for s in samples)
    for on_too_long in ("skip", "error"):
        t = trainer(micro_batch_tokens=longest - 1, on_too_long=on_too_long)
        reference = ScoreModel(ScoreModel.Config(model=MODEL).following(t.config))
        for score in (t.logprobs, reference.logprobs, t.scored):
            if on_too_long == "error":
                with pytest.raises(InvalidSampleError, match="does not fit"):
                    score(samples)
                continue
            found = [x.old_logprobs if isinstance(x, type(samples[0])) else x for x in score(samples)]
            for sample, values in zip(samples, found, strict=True):
                assert values is not None and values.any() == (sample.num_tokens < longest)


# --- cut over ranks ---------------------------------------------------------------------------------------


def score_on_a_rank(rendezvous: Rendezvous, settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 scores seven of eight samples, rank 1 one; then with other weights; then whole sequences."""
    samples = make_samples(8)
    model = ScoreModel(
        ScoreModel.Config(model=MODEL, micro_batch_tokens=64, **settings), rendezvous=rendezvous
    )
    share = (samples[:7], samples[7:])[model.world.data_rank] if model.world.data_size == 2 else samples
    result: dict[str, Any] = {"logprobs": model.logprobs(share), "ids": [s.id for s in share]}
    whole = ScoreModel(ScoreModel.Config(model=seeded(9)))
    model.load_weights((n, p.detach()) for n, p in whole.module.lm.named_parameters())
    result["moved"] = model.logprobs(share)
    judge = Judge(Judge.Config(model=MODEL, **settings), world=model.world)
    result["scores"] = sequence_scores(judge.module, judge.batcher, [s.trajectory.token_ids for s in share])
    result["parameters"] = sum(p.numel() for p in map(_local, model.module.parameters()))
    return result


def seeded(seed: int) -> ModelConfig:
    return MODEL.model_copy(update={"seed": seed})


class Judge(FrozenModel):
    def _make_module(self, lm: Any) -> ValueModule:
        module = ValueModule(lm)
        module.value_head.weight.data.copy_(torch.linspace(-1, 1, 32)[None])
        return module


def _local(parameter: Any) -> Any:
    from rill.training.parallel import local

    return local(parameter)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("settings", [{"shard": True}, {"tensor_parallel": 2}], ids=str)
def test_a_model_cut_over_ranks_gives_the_numbers_of_a_whole_one(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    samples = make_samples(8)
    whole = ScoreModel(ScoreModel.Config(model=MODEL))
    moved = ScoreModel(ScoreModel.Config(model=seeded(9)))
    judge = Judge(Judge.Config(model=MODEL))
    wanted = dict(zip([s.id for s in samples], whole.logprobs(samples), strict=True))
    later = dict(zip([s.id for s in samples], moved.logprobs(samples), strict=True))
    scores = sequence_scores(judge.module, judge.batcher, [s.trajectory.token_ids for s in samples])
    score_of = dict(zip([s.id for s in samples], scores, strict=True))
    results = run_ranks(tmp_path, 2, "tests.training.test_score:score_on_a_rank", settings)
    num_whole = sum(p.numel() for p in whole.module.parameters())
    for result in results:
        assert result["parameters"] < 0.8 * num_whole
        for name, found, after, score in zip(
            result["ids"], result["logprobs"], result["moved"], result["scores"], strict=True
        ):
            np.testing.assert_allclose(found, wanted[name], atol=2e-4)
            np.testing.assert_allclose(after, later[name], atol=2e-4)
            assert score == pytest.approx(score_of[name], abs=2e-3)
    assert {name for result in results for name in result["ids"]} == set(wanted)


def distil_on_a_rank(rendezvous: Rendezvous, shard: bool) -> dict[str, float]:
    t = PolicyTrainer(
        config(micro_batch_tokens=48),
        algorithm(distillation={"coefficient": 0.5, "form": "full_vocabulary"}),
        rendezvous=rendezvous,
    )
    teacher = ScoreModel(ScoreModel.Config(model=TEACHER, shard=shard), world=t.world)
    t.set_teachers([(teacher, 1.0)])
    return t.update(make_samples(8)[t.world.data_rank :: 2])


@pytest.mark.timeout(120)
def test_a_teacher_cut_over_the_students_ranks_teaches_what_a_whole_one_does(tmp_path: Path) -> None:
    t = distilling(micro_batch_tokens=48)
    t.set_teachers([(ScoreModel(ScoreModel.Config(model=TEACHER)), 1.0)])
    wanted = t.update(make_samples(8))
    for found in run_ranks(tmp_path, 2, "tests.training.test_score:distil_on_a_rank", True):
        for name in ("loss", "distillation/kl", "grad_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-3), name


# --- energies ---------------------------------------------------------------------------------------------


def test_energies_are_the_squared_gradient_of_the_log_probability_in_the_logits() -> None:
    samples = make_samples(3)
    t = PolicyTrainer(config(temperature=0.7), algorithm(advantage={"type": "optimal_token"}))
    model = load_model(MODEL, dtype=torch.float32)
    for sample in t.scored(samples):
        ids = torch.tensor(sample.trajectory.token_ids).long()
        logits = (model(ids[None]).logits[0, :-1] / 0.7).detach().requires_grad_()
        logp = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        (gradient,) = torch.autograd.grad(logp.sum(), logits)
        mask = sample.trajectory.loss_mask
        assert sample.energies is not None and sample.old_logprobs is not None
        np.testing.assert_allclose(
            sample.energies[mask], gradient.square().sum(-1).numpy()[mask[1:]], atol=1e-4
        )
        np.testing.assert_allclose(sample.old_logprobs[mask], logp.detach().numpy()[mask[1:]], atol=1e-4)
