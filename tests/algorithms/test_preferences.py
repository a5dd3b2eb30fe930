import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rill.algorithms import divisor
from rill.algorithms.preferences import BradleyTerryConfig, DPOConfig, bradley_terry_loss, dpo_loss
from rill.errors import TrainingError
from tests.algorithms.batches import flat, random_sequences


def pairs(seed, num_pairs=3):
    seqs = random_sequences(seed, num_seqs=2 * num_pairs)
    for seq in seqs:
        seq["mask"][0] = 1
    return seqs


def loss_of(seqs, config, rubbish=False):
    batch = flat(seqs)
    ref = batch.ref_logprobs_N
    if rubbish:
        ref = torch.where(batch.mask_N > 0, ref, torch.nan)
    chosen, rejected = torch.arange(0, len(seqs), 2), torch.arange(1, len(seqs), 2)
    result = dpo_loss(
        batch.logprobs_N, ref, batch.mask_N, batch.seq_N, batch.num_seqs, chosen, rejected, config
    )
    return result, batch


def expected_loss(seqs, config):
    total = 0.0
    for chosen, rejected in zip(seqs[::2], seqs[1::2]):
        h = []
        for s in (chosen, rejected):
            x = [lp - ref for lp, ref, m in zip(s["logp"], s["ref"], s["mask"]) if m]
            is_mean = config.length_normalised or config.loss == "ipo"
            h.append(sum(x) / (len(x) if is_mean else 1))
        margin, smooth = h[0] - h[1], config.label_smoothing
        sigmoid = 1 / (1 + math.exp(-config.beta * margin))
        total += {
            "sigmoid": -(1 - smooth) * math.log(sigmoid) - smooth * math.log(1 - sigmoid),
            "hinge": max(0.0, 1 - config.beta * margin),
            "ipo": (margin - 1 / (2 * config.beta)) ** 2,
        }[config.loss]
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
    config = DPOConfig(beta=beta, loss=loss, label_smoothing=smoothing, length_normalised=normalised)
    seqs = pairs(seed)
    result, _ = loss_of(seqs, config, rubbish=True)
    assert float(result.numerator.detach()) == pytest.approx(expected_loss(seqs, config))
    assert float(result.denominator) == 3


def test_smoothing_that_a_loss_would_not_read_is_refused():
    with pytest.raises(ValidationError, match="belongs to loss = 'sigmoid', got 'ipo'"):
        DPOConfig(loss="ipo", label_smoothing=0.1)


def test_dpo_does_not_depend_on_the_split():
    seqs, config = pairs(5, num_pairs=4), DPOConfig()
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
    result, _ = loss_of(seqs, DPOConfig())
    assert float((result.numerator / result.denominator).detach()) == pytest.approx(math.log(2))


def test_a_pair_without_trained_tokens_is_refused():
    seqs = pairs(1)
    seqs[1]["mask"] = [0] * len(seqs[1]["mask"])
    with pytest.raises(TrainingError, match="without trained tokens"):
        loss_of(seqs, DPOConfig())


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
