import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.algorithms import LOSSES, Algorithm, AlgorithmConfig, Metric, TokenBatch, divisor
from rill.algorithms.losses.covariance import largest_threshold, token_lottery
from tests.algorithms import reference
from tests.algorithms.batches import Ranks, flat, random_sequences, with_padding

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOCAL = {
    "clip": ({}, reference.clip),
    "clip asymmetric": (
        {"type": "clip", "clip_low": 0.1, "clip_high": 0.3},
        lambda s: reference.clip(s, 0.1, 0.3),
    ),
    "clip dual": (
        {"type": "clip", "dual_clip": 1.1},
        lambda s: reference.clip(s, dual=1.1),
    ),
    "reinforce": ({}, reference.reinforce),
    "gspo": ({"type": "gspo", "clip_low": 0.05, "clip_high": 0.08}, lambda s: reference.gspo(s, 0.05, 0.08)),
    "cispo": (
        {"type": "cispo", "clip_low": 0.3, "clip_high": 0.3},
        lambda s: reference.cispo(s, 0.3, 0.3),
    ),
    "gmpo": ({"type": "gmpo", "clip_low": 0.2, "clip_high": 0.3}, lambda s: reference.gmpo(s, 0.2, 0.3)),
    "sapo": ({}, reference.sapo),
    "dppo": (
        {"type": "dppo", "limit_low": 0.05, "limit_high": 0.05},
        lambda s: reference.dppo(s, "tv", 0.05, 0.05),
    ),
    "dppo kl": (
        {"type": "dppo", "divergence": "kl", "limit_low": 0.02, "limit_high": 0.03},
        lambda s: reference.dppo(s, "kl", 0.02, 0.03),
    ),
    "dro": ({"type": "dro", "beta": 0.7}, lambda s: reference.dro(s, 0.7)),
    "aipo": ({"type": "aipo", "delta": 1.2}, lambda s: reference.aipo(s, 1.2)),
    "aipo stopped": (
        {"type": "aipo", "delta": 1.2, "keep_gradient": True},
        lambda s: reference.aipo(s, 1.2, keep_gradient=True),
    ),
    "decoupled": ({"type": "decoupled", "weight_cap": 1.3}, lambda s: reference.decoupled(s, cap=1.3)),
    "decoupled clamp": (
        {"type": "decoupled", "weight_cap": 1.3, "over_cap": "clamp"},
        lambda s: reference.decoupled(s, cap=1.3, over="clamp"),
    ),
    "decoupled approximate": (
        {"type": "decoupled", "weight_cap": 1.3, "proximal": "approximate"},
        lambda s: reference.decoupled(s, cap=1.3, proximal="approximate"),
    ),
}
ALL_LOSSES = sorted(LOSSES)


def algorithm(loss, mode="token-mean", **more):
    loss = loss if isinstance(loss, dict) else {"type": loss}
    return Algorithm(
        AlgorithmConfig(advantage="grpo", loss=loss, aggregation=mode, aggregation_constant=7.0, **more)
    )


def total_loss(algo, batches):
    """The loss and gradients of a batch cut into micro-batches."""
    statistics = algo.statistics(batches)
    parts = [algo.policy_loss(_with(batch, statistics)) for batch in batches]
    by = divisor(sum(part.denominator for part in parts))
    loss = sum(part.numerator for part in parts) / by
    gradients = torch.autograd.grad(loss, [batch.logprobs_N for batch in batches])
    return float(loss.detach()), gradients


def _with(batch, statistics):
    return TokenBatch(
        **{**{k: getattr(batch, k) for k in batch.__dataclass_fields__}, "statistics": statistics}
    )


@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES))
def test_a_loss_and_its_gradient_equal_the_formula(name, seed, mode):
    config, formula = LOCAL[name]
    seqs = random_sequences(seed)
    algo = algorithm(config or name, mode)
    loss, (gradient,) = total_loss(algo, [flat(seqs)])
    expected, expected_gradient = reference.aggregate(seqs, [formula(s) for s in seqs], mode, constant=7.0)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    flat_expected = [g for row in expected_gradient for g in row]
    assert gradient.tolist() == pytest.approx(flat_expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", ALL_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES), cut=st.integers(1, 4))
def test_the_gradient_does_not_depend_on_the_split(loss, seed, mode, cut):
    seqs = random_sequences(seed, num_seqs=5)
    algo = algorithm({"type": loss, **({"share": 0.3} if "cov" in loss else {})}, mode)
    whole, (gradient,) = total_loss(algo, [flat(seqs)])
    parts, gradients = total_loss(algo, [flat(seqs[:cut]), flat(seqs[cut:])])
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert torch.cat(gradients).tolist() == pytest.approx(gradient.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", ALL_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES))
def test_the_order_of_sequences_does_not_matter(loss, seed, mode):
    seqs = random_sequences(seed)
    algo = algorithm(loss, mode)
    forward, _ = total_loss(algo, [flat(seqs)])
    backward, _ = total_loss(algo, [flat(seqs[::-1])])
    assert backward == pytest.approx(forward, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", ALL_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES))
def test_what_masked_tokens_hold_does_not_matter(loss, seed, mode):
    batch = flat(random_sequences(seed))
    padded, real = with_padding(batch, seed)
    algo = algorithm(
        loss, mode, kl={"coefficient": 0.1}, entropy_coefficient=0.01, distillation={"coefficient": 0.2}
    )
    plain, (gradient,) = total_loss(algo, [batch])
    strewn, (padded_gradient,) = total_loss(algo, [padded])
    assert strewn == pytest.approx(plain, rel=1e-9, abs=1e-12)
    assert padded_gradient[real].tolist() == pytest.approx(gradient.tolist(), rel=1e-9, abs=1e-12)
    assert padded_gradient[~real].abs().sum() == 0


@pytest.mark.parametrize("loss", ALL_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_on_fresh_samples_every_loss_has_the_gradient_of_reinforce(loss, seed):
    """r = 1: the gradient of each sequence is −A, whatever the clip."""
    seqs = random_sequences(seed, fresh=True)
    for seq in seqs:
        seq["adv"] = [seq["adv"][0]] * len(seq["adv"])  # GMPO is defined for one advantage per sequence
    config = {"type": loss, "share": 1e-9} if loss == "clip_cov" else {"type": loss}
    _, (gradient,) = total_loss(algorithm(config, "seq-mean-token-mean"), [flat(seqs)])
    _, (expected,) = total_loss(algorithm("reinforce", "seq-mean-token-mean"), [flat(seqs)])
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_zero_advantages_leave_the_policy_alone(loss):
    seqs = random_sequences(3)
    for seq in seqs:
        seq["adv"] = [0.0] * len(seq["adv"])
    penalty = {"kl_cov": {"coefficient": 0.0}, "dro": {"beta": 0.0}}  # pulls back whatever the advantage is
    config = {"type": loss, **penalty.get(loss, {})}
    _, (gradient,) = total_loss(algorithm(config), [flat(seqs)])
    assert gradient.abs().max() == 0


def test_clip_by_hand():
    batch = TokenBatch(
        logprobs_N=torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_(),
        old_logprobs_N=torch.zeros(4),
        rollout_logprobs_N=torch.zeros(4),
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        mask_N=torch.ones(4),
        seq_N=torch.zeros(4, dtype=torch.int64),
        num_seqs=1,
    )
    result = algorithm("clip", "token-sum").policy_loss(batch)
    # min(1.5, 1.2) + min(0.5, 0.8) − max(1.5, 1.2) − max(0.5, 0.8) = 1.2 + 0.5 − 1.5 − 0.8
    assert float(result.numerator.detach()) == pytest.approx(0.6, abs=1e-6)
    result.numerator.backward()
    assert batch.logprobs_N.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0], abs=1e-6)
    assert _value(result.metrics["policy/clipped"]) == 0.5


def test_gspo_by_hand():
    """Two tokens with ratios e^0.2 and e^−0.1: s = e^0.05."""
    seqs = [{**random_sequences(0)[0], "logp": [-0.8, -1.1], "old": [-1.0, -1.0], "mu": [-1.0, -1.0]}]
    seqs[0] = {k: (v[:1] * 2 if k in ("ref", "teacher", "entropy", "lag") else v) for k, v in seqs[0].items()}
    seqs[0] |= {"adv": [2.0, 2.0], "mask": [1, 1]}
    loss, (gradient,) = total_loss(
        algorithm({"type": "gspo", "clip_low": 0.5, "clip_high": 0.5}, "seq-mean-token-mean"), [flat(seqs)]
    )
    assert loss == pytest.approx(-2 * math.exp(0.05))
    assert gradient.tolist() == pytest.approx([-math.exp(0.05)] * 2)


def test_kl_cov_penalises_the_largest_covariances():
    seqs = random_sequences(11, num_seqs=5)
    batch = flat(seqs)
    algo = algorithm({"type": "kl_cov", "share": 0.25, "coefficient": 3.0}, "token-sum")
    covs = reference.covariances(seqs)
    ranked = sorted((c for row in covs for c in row if c is not None), reverse=True)
    count = max(1, int(0.25 * len(ranked)))
    terms = [
        [
            (
                -math.exp(lp - old) * a
                + (3.0 * abs(lp - old) if c is not None and c >= ranked[count - 1] else 0),
                0,
            )
            for lp, old, a, c in zip(s["logp"], s["old"], s["adv"], row)
        ]
        for s, row in zip(seqs, covs)
    ]
    expected, _ = reference.aggregate(seqs, terms, "token-sum")
    loss, _ = total_loss(algo, [batch])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert _value(algo.policy_loss(batch).metrics["policy/penalised"]) == pytest.approx(count / len(ranked))


def test_clip_cov_holds_about_its_share_and_only_in_the_band():
    generator = torch.Generator().manual_seed(0)
    count = 4000
    old = -torch.rand(count, generator=generator) * 4
    batch = TokenBatch(
        logprobs_N=old.clone().requires_grad_(),
        old_logprobs_N=old,
        rollout_logprobs_N=old,
        advantages_N=torch.randn(count, generator=generator) * 2,
        mask_N=torch.ones(count),
        seq_N=torch.arange(count) // 40,
        num_seqs=100,
    )
    algo = algorithm({"type": "clip_cov", "share": 0.05, "band_low": 0.5, "band_high": 5.0}, "token-sum")
    result = algo.policy_loss(batch)
    assert _value(result.metrics["policy/held"]) == pytest.approx(0.05, abs=0.015)
    (gradient,) = torch.autograd.grad(result.numerator, batch.logprobs_N)
    held = gradient == 0
    cov = (old - old.mean()) * (batch.advantages_N - batch.advantages_N.mean())
    assert 0 < held.sum() < count
    assert bool(((cov[held] > 0.5) & (cov[held] < 5.0)).all())


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    rank=st.integers(1, 40),
)
def test_the_threshold_over_ranks_is_the_sorted_value(values, cut, rank):
    rank = min(rank, len(values))
    parts = [torch.tensor(values[:cut], dtype=torch.float32), torch.tensor(values[cut:], dtype=torch.float32)]

    def work(number, reduce):
        return largest_threshold(
            [parts[number]], [torch.ones_like(parts[number])], torch.tensor(float(rank)), reduce
        )

    found = Ranks(2).run(work)
    assert float(found[0]) == float(found[1]) == sorted(values, reverse=True)[rank - 1]


def test_the_lottery_is_even_and_blind_to_the_split():
    seqs = [s for seed in range(300) for s in random_sequences(seed)]
    for seq in seqs:
        seq["mask"] = [1] * len(seq["mask"])
    whole = token_lottery(flat(seqs))
    halves = torch.cat([token_lottery(flat(seqs[:100])), token_lottery(flat(seqs[100:]))])
    assert torch.equal(whole, halves)
    counts = torch.histc(whole, bins=10, min=0, max=1) / whole.numel()
    assert counts.max() < 0.14 and counts.min() > 0.06


def test_the_approximated_anchor_follows_the_lag():
    """A fresh token is anchored at μ itself; the staler it is the nearer the anchor comes to π."""
    from rill.algorithms.losses.decoupled import approximate_proximal

    pi, mu = torch.full((3,), -1.0, requires_grad=True), torch.full((3,), -2.0)
    anchor = approximate_proximal(pi, mu, torch.tensor([0.0, 1.0, 3.0]))
    assert anchor.tolist() == [-2.0, -1.5, -1.25]
    assert not anchor.requires_grad


def test_the_policy_gradient_passes_autograds_own_check():
    seqs = random_sequences(5, spread=0.05)
    for loss in ("clip", "sapo", "gmpo", "aipo", "decoupled"):
        algo = algorithm(loss, "seq-mean-token-mean", kl={"coefficient": 0.1, "estimator": "k3"})
        batch = flat(seqs)

        def scalar(logprobs, algo=algo, batch=batch):
            return algo.policy_loss(
                TokenBatch(
                    **{**{k: getattr(batch, k) for k in batch.__dataclass_fields__}, "logprobs_N": logprobs}
                )
            ).numerator

        assert torch.autograd.gradcheck(scalar, (batch.logprobs_N.detach().requires_grad_(),))


def _value(metric: Metric) -> float:
    return float(metric.total / metric.weight)
