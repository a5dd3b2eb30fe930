import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rill.algorithms import divisor
from rill.algorithms.preferences.base import PreferenceBatch
from rill.algorithms.preferences.bradley_terry import BradleyTerryConfig, bradley_terry_loss
from rill.algorithms.preferences.dpo import DPO
from rill.algorithms.preferences.kto import KTO
from rill.algorithms.preferences.orpo import ORPO
from rill.algorithms.preferences.simpo import SimPO
from rill.errors import TrainingError
from tests.algorithms.batches import flat, random_sequences


def pairs(seed, num_pairs=3):
    seqs = random_sequences(seed, num_seqs=2 * num_pairs)
    for seq in seqs:
        seq["mask"][0] = 1
    return seqs


def loss_of(seqs, loss, rubbish=False, good=None, **more):
    batch = flat(seqs)
    ref = batch.ref_logprobs_N
    if rubbish:
        ref = torch.where(batch.mask_N > 0, ref, torch.nan)
    result = loss(
        PreferenceBatch(
            logprobs_N=batch.logprobs_N,
            ref_logprobs_N=ref if loss.needs_reference else None,
            mask_N=batch.mask_N,
            seq_N=batch.seq_N,
            num_seqs=batch.num_seqs,
            is_good_S=torch.tensor(good or [i % 2 == 0 for i in range(len(seqs))]),
            chosen_P=torch.arange(0, len(seqs), 2),
            rejected_P=torch.arange(1, len(seqs), 2),
            **more,
        )
    )
    return result, batch


def expected_loss(seqs, config):
    total = 0.0
    for chosen, rejected in zip(seqs[::2], seqs[1::2]):
        h = []
        for s in (chosen, rejected):
            x = [lp - ref for lp, ref, m in zip(s["logp"], s["ref"], s["mask"]) if m]
            is_mean = config.length_normalised or config.form == "ipo"
            h.append(sum(x) / (len(x) if is_mean else 1))
        margin, smooth = h[0] - h[1], config.label_smoothing
        sigmoid = 1 / (1 + math.exp(-config.beta * margin))
        total += {
            "sigmoid": -(1 - smooth) * math.log(sigmoid) - smooth * math.log(1 - sigmoid),
            "hinge": max(0.0, 1 - config.beta * margin),
            "ipo": (margin - 1 / (2 * config.beta)) ** 2,
        }[config.form]
    return total


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    form=st.sampled_from([("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]),
    beta=st.sampled_from([0.1, 0.7]),
    normalised=st.booleans(),
)
def test_preference_losses_equal_their_formulas(seed, form, beta, normalised):
    loss, smoothing = form
    config = DPO.Config(beta=beta, form=loss, label_smoothing=smoothing, length_normalised=normalised)
    seqs = pairs(seed)
    result, _ = loss_of(seqs, DPO(config), rubbish=True)
    assert float(result.numerator.detach()) == pytest.approx(expected_loss(seqs, config))
    assert float(result.denominator) == 3


def test_smoothing_that_a_loss_would_not_read_is_refused():
    with pytest.raises(ValidationError, match="belongs to form = 'sigmoid', got 'ipo'"):
        DPO.Config(form="ipo", label_smoothing=0.1)


def test_dpo_does_not_depend_on_the_split():
    seqs, config = pairs(5, num_pairs=4), DPO(DPO.Config())
    whole, batch = loss_of(seqs, config)
    (gradient,) = torch.autograd.grad(whole.numerator / divisor(whole.denominator), batch.logprobs_N)
    parts = [loss_of(seqs[:2], config), loss_of(seqs[2:], config)]
    by = divisor(sum(p.denominator for p, _ in parts))
    gradients = [torch.autograd.grad(p.numerator / by, b.logprobs_N)[0] for p, b in parts]
    assert torch.allclose(torch.cat(gradients), gradient)


def test_at_the_reference_dpo_is_log_2():
    seqs = pairs(1)
    for seq in seqs:
        seq["ref"] = list(seq["logp"])
    result, _ = loss_of(seqs, DPO(DPO.Config()))
    assert float((result.numerator / result.denominator).detach()) == pytest.approx(math.log(2))


def test_a_pair_without_trained_tokens_is_refused():
    seqs = pairs(1)
    seqs[1]["mask"] = [0] * len(seqs[1]["mask"])
    with pytest.raises(TrainingError, match="no trained tokens"):
        loss_of(seqs, DPO(DPO.Config()))


def answer_means(seqs):
    return [sum(lp for lp, m in zip(s["logp"], s["mask"]) if m) / sum(s["mask"]) for s in seqs]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beta=st.sampled_from([0.5, 2.0]), gamma=st.sampled_from([0.0, 1.2]))
def test_simpo_equals_its_formula(seed, beta, gamma):
    seqs = pairs(seed)
    means = answer_means(seqs)
    expected = sum(
        math.log(1 + math.exp(-(beta * w - beta * r - gamma))) for w, r in zip(means[::2], means[1::2])
    )
    result, _ = loss_of(seqs, SimPO(SimPO.Config(beta=beta, gamma=gamma)))
    assert float(result.numerator.detach()) == pytest.approx(expected) and float(result.denominator) == 3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beta=st.sampled_from([0.1, 1.0]))
def test_orpo_equals_its_formula_in_probabilities(seed, beta):
    seqs = pairs(seed)
    expected = 0.0
    chances = [math.exp(m) for m in answer_means(seqs)]
    for w, r in zip(chances[::2], chances[1::2]):
        ratio = (w / (1 - w)) / (r / (1 - r))
        expected += -math.log(w) - beta * math.log(1 / (1 + math.exp(-math.log(ratio))))
    result, _ = loss_of(seqs, ORPO(ORPO.Config(beta=beta)))
    assert float(result.numerator.detach()) == pytest.approx(expected) and float(result.denominator) == 3


def test_orpo_of_a_certain_answer_is_finite():
    seqs = pairs(1)
    seqs[0]["logp"] = [0.0] * len(seqs[0]["logp"])
    result, batch = loss_of(seqs, ORPO(ORPO.Config()))
    (gradient,) = torch.autograd.grad(result.numerator, batch.logprobs_N)
    assert torch.isfinite(result.numerator) and torch.isfinite(gradient).all()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kl=st.sampled_from([0.0, 0.7]),
    good=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_kto_equals_its_formula(seed, kl, good):
    """v(x, y) of the paper's equation 8, λ − v, over single answers of either kind."""
    seqs = random_sequences(seed, num_seqs=5)
    for seq in seqs:
        seq["mask"][0] = 1
    expected = 0.0
    for seq, desirable in zip(seqs, good):
        r = sum(lp - ref for lp, ref, m in zip(seq["logp"], seq["ref"], seq["mask"]) if m)
        weight, x = (1.3, 0.4 * (r - kl)) if desirable else (0.8, 0.4 * (kl - r))
        expected += weight - weight / (1 + math.exp(-x))
    loss = KTO(KTO.Config(beta=0.4, desirable_weight=1.3, undesirable_weight=0.8))
    result, _ = loss_of(seqs[:4] + seqs[4:], loss, rubbish=True, good=good, kl=kl)
    assert float(result.numerator.detach()) == pytest.approx(expected) and float(result.denominator) == 5


def test_bradley_terry_by_hand():
    chosen = torch.tensor([2.0, 0.0], requires_grad=True)
    rejected = torch.tensor([1.0, 1.0])
    result = bradley_terry_loss(chosen, rejected, BradleyTerryConfig())
    expected = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))
    assert float(result.numerator.detach()) == pytest.approx(expected)
    result.numerator.backward()
    assert chosen.grad.tolist() == pytest.approx([-1 / (1 + math.e), -1 / (1 + math.exp(-1))])
    assert float(result.metrics["reward_model/accuracy"].total) == 1.0
    centred = bradley_terry_loss(chosen, rejected, BradleyTerryConfig(centre=0.1))
    assert float(centred.numerator.detach()) == pytest.approx(expected + 0.1 * (9 + 1))
    margin = bradley_terry_loss(chosen, rejected, BradleyTerryConfig(), margins_P=torch.tensor([1.0, -1.0]))
    assert float(margin.numerator.detach()) == pytest.approx(2 * math.log(2))


def test_scores_that_are_not_finite_or_not_paired_are_refused():
    with pytest.raises(TrainingError, match="score differences"):
        bradley_terry_loss(torch.tensor([float("nan")]), torch.tensor([1.0]), BradleyTerryConfig())
    with pytest.raises(TrainingError, match="2 chosen but 1 rejected"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(1), BradleyTerryConfig())
