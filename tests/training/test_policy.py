"""PolicyTrainer against the plain model: gradients, the recompute contract, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rill.algorithms import Algorithm, LossSum
from rill.algorithms.base import TokenBatch
from rill.errors import ConfigError, InvalidSampleError, TrainingError
from rill.models.loading import load_model
from rill.training.policy import PolicyTrainer
from rill.training.step import mini_batches
from rill.training.value import ValueTrainer
from rill.types import Sample
from tests.training.tiny import MODEL, SHAPE, VOCAB, algorithm, config, make_samples, trainer


def plain_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor(sample.trajectory.token_ids).long()
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def plain_gradient(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """GRPO's loss sum on one step per batch: −Σ A · π/sg[π] over trained tokens, sequence by sequence."""
    model = load_model(MODEL, dtype=torch.float32)
    for sample in samples:
        logprobs = plain_logprobs(model, sample)
        mask = torch.tensor(sample.trajectory.loss_mask[1:])
        advantages = torch.tensor(sample.advantages[1:])
        ratio = (logprobs - logprobs.detach()).exp()
        (-(ratio * advantages)[mask].sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradient(t: PolicyTrainer, wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    found = {name.removeprefix("lm."): g for name, g in t.engine.gradients().items()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (found[name].float() - gradient).norm() / (gradient.norm() + 1e-12)
        assert error < tolerance, (name, float(error))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"micro_batch_tokens": 33},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"tree_packing": True},
        {"tree_packing": True, "micro_batch_tokens": 50},
        {"head_chunk_bytes": 4 * VOCAB * 3},
    ],
    ids=str,
)
def test_any_split_packing_or_checkpointing_has_the_gradient_of_the_plain_model(
    values: dict[str, Any],
) -> None:
    samples = make_samples()
    t = trainer(**values)
    t.begin()
    t.accumulate(samples)
    assert_same_gradient(t, plain_gradient(samples))


def test_accumulating_in_pieces_is_the_update_of_the_whole() -> None:
    samples = make_samples()
    whole, pieces = trainer(), trainer()
    wanted = whole.update(samples)
    pieces.begin()
    for part in (samples[:1], samples[1:6], samples[6:]):
        pieces.accumulate(part)
    found = pieces.finish()
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert found["samples"] == len(samples)
    for (name, a), (_, b) in zip(whole.named_weights(), pieces.named_weights(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0, msg=name)


def test_bfloat16_compute_keeps_float32_masters_and_stays_near_the_gradient() -> None:
    samples = make_samples()
    t = trainer(compute_dtype="bfloat16")
    t.begin()
    t.accumulate(samples)
    assert_same_gradient(t, plain_gradient(samples), tolerance=0.08)
    assert all(s.master.dtype == torch.float32 for s in t.engine.slots)
    assert all(g.dtype == torch.float32 for g in t.engine.gradients().values())
    t.finish()
    for slot in t.engine.slots:
        assert torch.equal(slot.template.float(), slot.master.bfloat16().float()), slot.name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_plain_models_at_the_given_temperature(temperature: float) -> None:
    samples = make_samples()
    model = load_model(MODEL, dtype=torch.float32)
    found = trainer(micro_batch_tokens=64, tree_packing=True).logprobs(samples, temperature)
    for sample, values in zip(samples, found, strict=True):
        wanted = plain_logprobs(model, sample, temperature).detach().numpy()
        assert values.dtype == np.float32 and values[0] == 0
        np.testing.assert_allclose(values[1:], wanted, atol=2e-5)
    trained = trainer(temperature=temperature).logprobs(samples, trained_only=True)
    for sample, values, all_values in zip(samples, trained, found, strict=True):
        np.testing.assert_allclose(values, all_values * sample.trajectory.loss_mask, atol=2e-5)


class Watching(Algorithm):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__(algorithm().config)
        self.seen: list[TokenBatch] = []

    def policy_loss(self, batch: TokenBatch) -> LossSum:
        self.seen.append(batch)
        return super().policy_loss(batch)


def test_one_step_per_batch_makes_no_extra_pass_and_old_equals_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watching = Watching()
    t = PolicyTrainer(config(), watching)
    passes = []
    original = t.engine.module.hidden
    monkeypatch.setattr(t.engine.module, "hidden", lambda pack: passes.append(1) or original(pack))
    t.update(make_samples())
    assert len(passes) == len(watching.seen) == 1
    assert torch.equal(watching.seen[0].old_logprobs_N, watching.seen[0].logprobs_N.detach())


def test_several_steps_per_batch_share_the_old_logprobs_of_the_start() -> None:
    samples = make_samples()
    watching = Watching()
    t = PolicyTrainer(config(num_epochs=2, num_mini_batches=2, optimizer={"learning_rate": 1e-2}), watching)
    before = t.logprobs(samples, trained_only=True)
    metrics = t.update(samples)
    assert t.version == 4 and metrics["samples"] == 2 * len(samples)
    starts = np.sort(
        np.concatenate([v[s.trajectory.loss_mask] for v, s in zip(before, samples, strict=True)])
    )
    for first in (0, 2):
        olds = torch.cat([b.old_logprobs_N for b in watching.seen[first : first + 2]]).numpy()
        np.testing.assert_allclose(np.sort(olds), starts, atol=1e-5)
    last = watching.seen[3]
    assert not torch.allclose(last.old_logprobs_N, last.logprobs_N.detach(), atol=1e-3)


def test_old_logprobs_that_samples_bring_are_not_computed_again() -> None:
    brought = [
        dataclasses.replace(s, old_logprobs=np.full(s.num_tokens, -3.0, dtype=np.float32))
        for s in make_samples()
    ]
    watching = Watching()
    t = PolicyTrainer(config(num_epochs=2), watching)
    t.update(brought)
    assert all(batch.old_logprobs_N.eq(-3.0).all() for batch in watching.seen)


def test_rollout_logprobs_and_lag_reach_the_algorithm_beside_the_recomputed_ones() -> None:
    samples = make_samples(2)
    watching = Watching()
    t = PolicyTrainer(config(), watching)
    t.begin(version=3)
    t.accumulate(samples)
    batch = watching.seen[0]
    wanted = np.concatenate([s.trajectory.logprobs[s.trajectory.loss_mask] for s in samples])
    np.testing.assert_allclose(batch.rollout_logprobs_N.numpy(), wanted)
    assert batch.lag_N is not None and batch.lag_N.eq(3).all()


@pytest.mark.parametrize("values", [{}, {"micro_batch_tokens": 33}, {"tree_packing": True}], ids=str)
def test_of_logged_samples_the_trainers_figures_are_told_token_by_token(values: dict[str, Any]) -> None:
    samples = [dataclasses.replace(s, is_logged=i % 2 == 0) for i, s in enumerate(make_samples())]
    t, told = trainer(**values), {}
    t.on_trained = lambda sample, *columns: told.update({sample.id: (sample, *columns)})
    t.update(samples)
    assert set(told) == {sample.id for sample in samples if sample.is_logged}
    model = load_model(MODEL, dtype=torch.float32)
    for sample, logprobs, entropies in told.values():
        mask = sample.trajectory.loss_mask
        assert not logprobs[~mask].any() and not entropies[~mask].any()
        wanted = np.append(0, plain_logprobs(model, sample).detach().numpy())
        np.testing.assert_allclose(logprobs[mask], wanted[mask], rtol=1e-4, atol=1e-5)
        assert (entropies[mask] > 0).all()


def test_training_raises_the_probability_of_what_was_good() -> None:
    samples = make_samples(4)
    t = trainer(optimizer={"learning_rate": 1e-2})
    before = t.logprobs(samples, trained_only=True)
    for _ in range(5):
        t.update(samples)
    after = t.logprobs(samples, trained_only=True)
    gains = [float((a - b).sum() * s.advantages[-1]) for a, b, s in zip(after, before, samples, strict=True)]
    assert sum(gains) > 0


def test_nan_advantages_change_nothing_and_are_an_error_or_a_counted_skip() -> None:
    samples = make_samples()
    bad = dataclasses.replace(samples[0], advantages=np.full_like(samples[0].advantages, np.nan))
    t = trainer()
    weights = {n: w.clone() for n, w in t.named_weights()}
    with pytest.raises(TrainingError, match="not finite"):
        t.update([bad, *samples[1:]])
    assert t.version == 0
    skipping = trainer(on_nonfinite="skip")
    metrics = skipping.update([bad, *samples[1:]])
    assert metrics["skipped_steps"] == 1 and skipping.version == 0
    for t_ in (t, skipping):
        assert all(torch.equal(w, weights[n]) for n, w in t_.named_weights())
    # Nothing of the refused batch is left in the next one.
    clean = trainer()
    clean.update(samples)
    t.update(samples)
    for (name, a), (_, b) in zip(t.named_weights(), clean.named_weights(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "algo", [{}, {"loss": "kl_cov"}, {"correction": {"type": "tis", "normalise": True}}], ids=str
)
def test_an_empty_batch_is_a_training_error(algo: dict[str, Any]) -> None:
    t = PolicyTrainer(config(), algorithm(**algo))
    with pytest.raises(TrainingError, match="no token to train on"):
        t.update([])
    with pytest.raises(TrainingError, match="without begin"):
        t.finish()


def test_samples_without_trained_tokens_are_skipped_and_counted() -> None:
    samples = make_samples()
    nothing = dataclasses.replace(
        samples[0].trajectory, loss_mask=np.zeros_like(samples[0].trajectory.loss_mask)
    )
    metrics = trainer().update([dataclasses.replace(samples[0], trajectory=nothing), *samples[1:]])
    assert metrics["skipped_samples"] == 1 and metrics["samples"] == len(samples) - 1


def test_a_sequence_over_the_budget_is_an_error_or_a_counted_skip() -> None:
    samples = make_samples()
    longest = max(s.num_tokens for s in samples)
    with pytest.raises(InvalidSampleError, match=f"{longest} tokens does not fit"):
        trainer(micro_batch_tokens=longest - 1).update(samples)
    metrics = trainer(micro_batch_tokens=longest - 1, on_too_long="skip").update(samples)
    assert metrics["skipped_samples"] >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([1, VOCAB, 3], dtype=np.int32)}, "another tokenizer"),
        ({"token_ids": np.array([1.0, 2.0, 3.0])}, "not integers"),
        ({"loss_mask": np.array([0, 1, 1])}, "not bool"),
    ],
)
def test_token_ids_and_masks_that_cannot_be_right_are_refused(change: dict[str, Any], message: str) -> None:
    base = make_samples(1)[0].trajectory
    trimmed = {
        name: getattr(base, name)[-3:]
        for name in ("token_ids", "logprobs", "versions", "loss_mask", "turn_ids")
    }
    trajectory = dataclasses.replace(base, **{**trimmed, **change})
    with pytest.raises(InvalidSampleError, match=message):
        trainer().update([Sample(trajectory=trajectory, advantages=np.ones(3, dtype=np.float32))])


def test_batch_invariant_logprobs_have_the_same_bits_alone_and_together() -> None:
    from rill.models.ops.cpu_kernels import load_cpu_kernels

    if load_cpu_kernels() is None:
        pytest.skip("no compiler for the CPU kernels")
    samples = make_samples()
    t = trainer(batch_invariant=True, model={"shape": {**SHAPE, "head_dim": 16}})
    t.update(samples)
    together = t.logprobs(samples)
    for sample, values in zip(samples, together, strict=True):
        np.testing.assert_array_equal(t.logprobs([sample])[0], values)
    longest = max(sample.num_tokens for sample in samples)
    short = trainer(
        batch_invariant=True,
        model={"shape": {**SHAPE, "head_dim": 16}},
        micro_batch_tokens=longest - 1,
        on_too_long="skip",
    )
    assert [len(v) for v in short.logprobs(samples)] == [len(v) for v in together], "0 where it is too long"
    for values, wanted in zip(
        together, t._recomputed(t._sequences(samples, every_token=True), 1.0), strict=True
    ):
        np.testing.assert_allclose(values, wanted, atol=1e-4)


def test_settings_that_a_trainer_would_not_read_are_refused() -> None:
    with pytest.raises(ValidationError, match="set compile = true"):
        config(activation_memory_budget=0.5)
    with pytest.raises(
        ValidationError, match="batch_invariant"
    ):  # a policy's, who is asked for log-probabilities
        ValueTrainer.Config(model=MODEL, batch_invariant=True)


def test_batch_invariant_logprobs_of_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="without lora"):
        trainer(batch_invariant=True, lora={"rank": 2})


def test_every_pass_sees_every_sample_once_in_an_order_of_its_own() -> None:
    cut = list(mini_batches(config(num_epochs=2, num_mini_batches=3), 10, version=4))
    assert [len(part) for part in cut] == [4, 3, 3] * 2
    first, second = cut[:3], cut[3:]
    for passed in (first, second):
        assert sorted(index for part in passed for index in part) == list(range(10))
    assert first != second
    assert cut == list(mini_batches(config(num_epochs=2, num_mini_batches=3), 10, version=4))
    assert cut != list(mini_batches(config(num_epochs=2, num_mini_batches=3), 10, version=5))
