from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from rill.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    PRESETS,
    Algorithm,
    AlgorithmConfig,
    Need,
    TokenBatch,
    divisor,
)
from rill.algorithms.segments import discounted_tail
from rill.config.base import Config
from rill.errors import ConfigError, TrainingError
from tests.algorithms import reference
from tests.algorithms.batches import flat, random_sequences


class Recipe(Config):
    algorithm: AlgorithmConfig


# --- configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_builds_and_survives_a_round_trip(name):
    config = Recipe(algorithm=name).algorithm
    Algorithm(config)
    assert config.type == name
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    "penalty",
    [
        {"filters": {"overlong": {"limit_tokens": 100, "buffer_tokens": 10}}},
        {"kl": {"coefficient": 0.1, "place": "reward"}},
    ],
)
def test_a_penalty_that_gdpo_would_not_see_is_refused(penalty):
    with pytest.raises(ConfigError, match="would be lost"):
        Algorithm(AlgorithmConfig.model_validate({"advantage": {"type": "gdpo"}, **penalty}))


def test_a_recipe_overrides_a_preset_key_by_key():
    config = AlgorithmConfig.model_validate(
        {"type": "dapo", "loss": {"clip_high": 0.4}, "filters": {"mask_truncated": True}}
    )
    assert (config.loss.type, config.loss.clip_low, config.loss.clip_high) == ("clip", 0.2, 0.4)
    assert config.filters.drop_equal_rewards and config.filters.mask_truncated
    replaced = AlgorithmConfig.model_validate({"type": "dapo", "loss": "gspo"})
    assert replaced.loss.type == "gspo" and replaced.loss.clip_high == 4e-4
    assert (
        AlgorithmConfig.model_validate({"type": "dapo", "advantage": {"type": "rloo"}}).advantage.type
        == "rloo"
    )
    assert PRESETS["dapo"]["loss"] == {"type": "clip", "clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("grpoo", "did you mean 'grpo'"),
        ({"type": "grpo", "loss": "clipp"}, "did you mean 'clip'"),
        ({"type": "grpo", "loss": {"clip_hi": 1}}, "clip_hi"),
        ({"type": "grpo", "advantages": "grpo"}, "advantages"),
        ({"type": "grpo", "aggregation": "seq-mean-token-sum-norm"}, "aggregation_constant"),
        ({"type": "grpo", "correction": {"type": "mis", "low": 3, "high": 2}}, "must be below"),
        ({"type": "grpo", "loss": {"clip_low": -0.1}}, "clip_low"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(value, message):
    with pytest.raises(ValidationError, match=message):
        Recipe(algorithm=value)


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES, CORRECTIONS], ids=lambda r: r.kind)
def test_every_registered_part_documents_itself(registry):
    for name in registry:
        part = registry.load(name)
        assert part.Config.model_fields["type"].annotation is not str
        needs_more = {"chain": {"parts": ["none"]}, "lag_limit": {"max_lag": 1}}.get(name, {})
        assert part.Config(**needs_more).type == name
        for key, field in part.Config.model_fields.items():
            assert key == "type" or field.description, f"{name}.{key}"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_preset_but_a_sum_over_pairs_grows_with_the_length_of_answers(name):
    """A loss that sums over tokens is cut by max_grad_norm = 1 at every step."""
    config = Recipe(algorithm=name).algorithm
    assert config.aggregation != "token-sum"
    assert config.aggregation != "seq-mean-token-sum" or name == "online_dpo"


def test_clip_cov_can_leave_the_ratio_unbounded_below_as_its_authors_do():
    assert (
        AlgorithmConfig.model_validate({"type": "clip_cov", "loss": {"clip_low": 1.0}}).loss.clip_low == 1.0
    )


def test_a_policy_that_has_moved_is_not_taken_for_a_mismatch():
    batch = flat(random_sequences(3))
    result = Algorithm(AlgorithmConfig(type="aipo")).policy_loss(batch)
    assert "mismatch/abs_mean" in result.metrics
    moved = Algorithm(AlgorithmConfig(type="aipo")).policy_loss(replace(batch, knows_old=False))
    assert not any(name.startswith("mismatch/") for name in moved.metrics)


def test_needs_follow_the_configuration():
    def needs(**config):
        return Algorithm(AlgorithmConfig(**config)).needs

    assert needs() == {Need.OLD_LOGPROBS}
    assert needs(type="aipo") == frozenset()
    assert Need.LAG in needs(type="decoupled_ppo", loss={"proximal": "approximate"})
    assert Need.REF_LOGPROBS in needs(kl={"coefficient": 0.1})
    assert Need.ENTROPY in needs(entropy_coefficient=0.1)
    assert Need.TEACHER_LOGPROBS in needs(type="distill")
    assert Need.FULL_VOCABULARY_TEACHER in needs(type="distill", distillation={"form": "full_vocabulary"})


def test_a_part_from_outside_needs_no_change_here():
    config = AlgorithmConfig(
        loss={"type": "tests.algorithms.outside:Constant", "value": 3.0}, aggregation="token-mean"
    )
    result = Algorithm(config).policy_loss(flat(random_sequences(0)))
    assert float(result.numerator / result.denominator) == pytest.approx(3.0)


# --- checks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["logprobs_N", "old_logprobs_N", "rollout_logprobs_N", "advantages_N"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_on_a_trained_token_refuses_the_update(field, bad):
    seqs = random_sequences(2)
    batch = flat(seqs)
    values = getattr(batch, field).detach().clone()
    values[batch.mask_N.nonzero()[0]] = bad
    with pytest.raises(TrainingError, match=f"{field}: 1"):
        Algorithm(AlgorithmConfig()).policy_loss(flat(seqs, **{field: values}))


def test_a_field_of_the_wrong_length_is_named():
    seqs = random_sequences(2)
    with pytest.raises(TrainingError, match="advantages_N has shape"):
        Algorithm(AlgorithmConfig()).policy_loss(flat(seqs, advantages_N=torch.zeros(99)))


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_empty_micro_batch_adds_nothing(loss, num_tokens):
    zeros = torch.zeros(num_tokens)
    logprobs = zeros.clone().requires_grad_()
    batch = TokenBatch(
        logprobs_N=logprobs,
        mask_N=zeros,
        seq_N=torch.zeros(num_tokens, dtype=torch.int64),
        num_seqs=min(num_tokens, 1),
        advantages_N=zeros,
        old_logprobs_N=zeros,
        rollout_logprobs_N=zeros,
    )
    for mode in ("token-mean", "seq-mean-token-mean"):
        result = Algorithm(AlgorithmConfig(loss=loss, aggregation=mode)).policy_loss(batch)
        assert float(result.numerator.detach()) == 0.0 and float(result.denominator) == 0.0
        (gradient,) = torch.autograd.grad(result.numerator, logprobs)
        assert gradient.abs().sum() == 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_half_precision_is_computed_in_float32(loss):
    seqs = random_sequences(7, spread=0.1)
    batch = flat(seqs, torch.bfloat16)
    result = Algorithm(AlgorithmConfig(loss=loss)).policy_loss(batch)
    assert result.numerator.dtype == torch.float32
    result.numerator.backward()
    assert torch.isfinite(batch.logprobs_N.grad).all()


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_policies_far_apart_give_finite_losses(loss):
    seqs = random_sequences(7)
    for s in seqs:
        s["old"], s["mu"] = (
            [-300.0] * len(s["old"]),
            [-500.0 if i % 2 else -0.1 for i in range(len(s["old"]))],
        )
    batch = flat(seqs, torch.float32)
    result = Algorithm(AlgorithmConfig(loss=loss)).policy_loss(batch)
    result.numerator.backward()
    assert torch.isfinite(result.numerator) and torch.isfinite(batch.logprobs_N.grad).all()
    assert all(torch.isfinite(m.total) for m in result.metrics.values())


def test_a_sum_is_divided_by_one():
    assert divisor(torch.tensor([0.0, 4.0])).tolist() == [1.0, 4.0]


# --- the critic -------------------------------------------------------------------------------------------


def test_the_value_loss_and_its_gradient_equal_the_formula():
    generator = torch.Generator().manual_seed(0)
    count = 60
    values, old, returns = (torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(count, generator=generator) < 0.7).double()
    values.requires_grad_()
    zeros = torch.zeros(count, dtype=torch.float64)
    batch = TokenBatch(
        logprobs_N=zeros, mask_N=mask, seq_N=torch.zeros(count, dtype=torch.int64), num_seqs=1,
        advantages_N=zeros, old_logprobs_N=zeros, rollout_logprobs_N=zeros,
        values_N=values, old_values_N=old, returns_N=torch.where(mask > 0, returns, torch.nan),
    )  # fmt: skip
    result = Algorithm(AlgorithmConfig(value={"clip": 0.3, "coefficient": 2.0})).value_loss(batch)
    terms = [reference.value_loss(*row, 0.3) for row in zip(values.tolist(), old.tolist(), returns.tolist())]
    on = mask.tolist()
    assert float(result.denominator) == sum(on)
    assert float(result.numerator.detach()) == pytest.approx(2 * sum(v * m for (v, _), m in zip(terms, on)))
    (gradient,) = torch.autograd.grad(result.numerator, values)
    assert gradient.tolist() == pytest.approx([2 * g * m for (_, g), m in zip(terms, on)])


def test_a_long_scan_equals_the_loop():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator, dtype=torch.float64)
    seq = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 600, 3, 396]))
    for decay in (1.0, 0.97, 0.0):
        found = discounted_tail(values, seq, decay)
        expected, running = [], 0.0
        for t in reversed(range(1000)):
            last = t == 999 or seq[t + 1] != seq[t]
            running = float(values[t]) + (0.0 if last else decay * running)
            expected.append(running)
        assert found.tolist() == pytest.approx(expected[::-1], abs=1e-9)


def test_a_recipe_takes_a_name_a_table_or_a_built_config():
    built = AlgorithmConfig.model_validate("dapo")
    assert Recipe(algorithm=built).algorithm == Recipe(algorithm={"type": "dapo"}).algorithm == built
