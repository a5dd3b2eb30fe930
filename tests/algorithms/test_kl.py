import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.algorithms.kl import AdaptiveKL, KLEstimator, kl_penalty
from rill.errors import TrainingError
from tests.algorithms import reference
from tests.algorithms.batches import flat, random_sequences


def grpo(**more):
    return Algorithm(AlgorithmConfig(advantage="grpo", loss="reinforce", aggregation="token-sum", **more))


@pytest.mark.parametrize("estimator", list(KLEstimator))
@settings(max_examples=30, deadline=None)
@given(lp=st.floats(-2, 0), ref=st.floats(-2, 0))
def test_an_estimator_and_its_gradient_equal_the_formula(estimator, lp, ref):
    logprob = torch.tensor([lp], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprob, torch.tensor([ref], dtype=torch.float64), estimator)
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    expected, slope = reference.kl(lp, ref, estimator)
    assert float(value.detach()) == pytest.approx(expected, abs=1e-9)
    assert float(gradient) == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_far_off_tokens_stay_finite(estimator):
    logprob = torch.tensor([-1e4, 0.0], requires_grad=True)
    value = kl_penalty(logprob, torch.tensor([0.0, -1e4]), estimator)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logprob.grad).all()
    if estimator == "k3":
        assert value.max() <= 10.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "abs", "k1+", "k3+"])
def test_a_token_far_from_the_reference_is_still_pulled_back(estimator):
    """Only what is exponentiated has a bound: beyond ±20 nats the others keep their value and their gradient."""
    logprob = torch.tensor([-45.0], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprob, torch.tensor([-5.0], dtype=torch.float64), KLEstimator(estimator))
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    expected, slope = reference.kl(-45.0, -5.0, estimator)
    assert float(gradient) == pytest.approx(slope) != 0
    assert estimator == "k3+" or float(value.detach()) == pytest.approx(expected)


def test_the_estimators_agree_on_the_divergence_of_two_known_distributions():
    """k1 and k3 are unbiased: over all tokens, weighed by π, they give KL(π ∥ π_ref) exactly."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = float((p * (p / q).log()).sum())
    for estimator in (KLEstimator.K1, KLEstimator.K3):
        assert float((p * kl_penalty(p.log(), q.log(), estimator)).sum()) == pytest.approx(exact, rel=1e-5)


def test_kl_and_entropy_join_the_loss():
    seqs = random_sequences(4)
    config = {"kl": {"coefficient": 0.2, "estimator": "k3"}, "entropy_coefficient": 0.05}
    result = grpo(**config).policy_loss(flat(seqs))
    terms = [
        [
            (v + 0.2 * reference.kl(lp, ref, "k3")[0] - 0.05 * h, 0)
            for (v, _), lp, ref, h in zip(reference.reinforce(s), s["logp"], s["ref"], s["entropy"])
        ]
        for s in seqs
    ]
    assert float(result.numerator.detach()) == pytest.approx(reference.aggregate(seqs, terms, "token-sum")[0])
    assert {"policy/kl_ref", "policy/entropy"} <= set(result.metrics)


def test_distillation_moves_the_advantage():
    seqs = random_sequences(6)
    result = grpo(distillation={"coefficient": 0.5}).policy_loss(flat(seqs))
    for s in seqs:
        s["adv"] = [a - 0.5 * (old - t) for a, old, t in zip(s["adv"], s["old"], s["teacher"])]
    expected, _ = reference.aggregate(seqs, [reference.reinforce(s) for s in seqs], "token-sum")
    assert float(result.numerator.detach()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kl": {"coefficient": 0.1}}, "ref_logprobs_N"),
        ({"entropy_coefficient": 0.1}, "entropy_N"),
        ({"distillation": {"coefficient": 0.1}}, "teacher_logprobs_N"),
    ],
)
def test_a_missing_field_is_named(config, field):
    with pytest.raises(TrainingError, match=field):
        grpo(**config).policy_loss(flat(random_sequences(1), **{field: None}))


def test_the_adaptive_controller_steers_towards_its_target():
    controller = AdaptiveKL(AdaptiveKL.Config(target=0.1, horizon=100), 0.5)
    controller.update(kl=0.11, num_samples=50)
    assert controller.coefficient == pytest.approx(0.5 * (1 + 0.1 * 50 / 100))
    controller.update(kl=9.0, num_samples=50)  # clipped to +20 %
    assert controller.coefficient == pytest.approx(0.525 * 1.1)
    controller.update(kl=0.0, num_samples=100)
    assert controller.coefficient == pytest.approx(0.525 * 1.1 * 0.8)


def test_an_adaptive_controller_that_could_never_leave_0_is_refused():
    with pytest.raises(ValidationError, match="set coefficient to where it starts"):
        grpo(kl={"controller": "adaptive"})


def test_the_coefficient_is_saved_and_loaded():
    kl = {"coefficient": 0.1, "controller": {"type": "adaptive", "target": 0.01, "horizon": 10}}
    first, second = grpo(kl=kl), grpo(kl=kl)
    first.observe({"policy/kl_ref": 0.5}, num_samples=10)
    first.observe({"policy/loss": 0.5}, num_samples=10)
    second.load_state_dict(first.state_dict())
    assert second.kl_controller.coefficient == first.kl_controller.coefficient == pytest.approx(0.12)
    fixed = grpo(kl={"coefficient": 0.1})
    fixed.kl_controller.update(kl=0.5, num_samples=10)
    assert fixed.state_dict() == {"kl": {"coefficient": 0.1}}
