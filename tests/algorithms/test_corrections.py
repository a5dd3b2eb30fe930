import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.algorithms import Algorithm, AlgorithmConfig, Need, TokenBatch, divisor, finish_metrics
from rill.errors import ConfigError
from tests.algorithms import reference
from tests.algorithms.batches import Ranks, flat, random_sequences

EVERY = [
    {"type": "none"},
    {"type": "tis", "high": 1.2},
    {"type": "tis", "high": 1.2, "level": "sequence"},
    {"type": "tis", "high": 1.2, "normalise": True},
    {"type": "mis", "low": 0.8, "high": 1.3},
    {"type": "mis", "low": 0.8, "high": 1.3, "level": "sequence", "renormalise": True},
    {"type": "mis", "low": 0.8, "high": 1.3, "normalise": True},
    {"type": "sequence_mask", "estimator": "k3", "reduction": "mean", "high": 0.08},
    {"type": "lag_limit", "max_lag": 2},
    {"type": "chain", "parts": [{"type": "sequence_mask", "high": 0.08}, {"type": "tis", "high": 1.2}]},
]
label = str


def algorithm(correction, **more):
    return Algorithm(
        AlgorithmConfig(
            advantage="grpo", loss="clip", correction=correction, aggregation="token-mean", **more
        )
    )


def loss_of(algo, batches):
    statistics = algo.statistics(batches)
    parts = [algo.policy_loss(_with(batch, statistics)) for batch in batches]
    loss = sum(p.numerator for p in parts) / divisor(sum(p.denominator for p in parts))
    return float(loss.detach()), torch.cat(torch.autograd.grad(loss, [b.logprobs_N for b in batches]))


def _with(batch, statistics):
    return TokenBatch(
        **{**{k: getattr(batch, k) for k in batch.__dataclass_fields__}, "statistics": statistics}
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(["token", "sequence"]))
def test_truncated_and_masked_weights_equal_their_formulas(seed, level):
    seqs = random_sequences(seed)
    terms = [reference.clip(s) for s in seqs]
    weights = [reference.tis(s, 1.2, level) for s in seqs]
    expected, gradient = reference.aggregate(seqs, terms, "token-mean", weights=weights)
    loss, found = loss_of(algorithm({"type": "tis", "high": 1.2, "level": level}), [flat(seqs)])
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.tolist() == pytest.approx([g for row in gradient for g in row], rel=1e-9, abs=1e-12)

    weights = [reference.mis(s, 0.8, 1.3, level) for s in seqs]
    keep = [[1.0 if w else 0.0 for w in row] for row in weights]
    config = {"type": "mis", "low": 0.8, "high": 1.3, "level": level}
    expected, _ = reference.aggregate(seqs, terms, "token-mean", weights=weights)
    assert loss_of(algorithm(config), [flat(seqs)])[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    expected, _ = reference.aggregate(seqs, terms, "token-mean", weights=weights, keep=keep)
    assert loss_of(algorithm({**config, "renormalise": True}), [flat(seqs)])[0] == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_sequence_masks_drop_what_the_formula_drops(estimator, reduction):
    dropped = 0
    for seed in range(12):
        seqs = random_sequences(seed, num_seqs=5)
        keep_row = [-0.3 <= reference.divergence(s, estimator, reduction) <= 0.15 for s in seqs]
        dropped += keep_row.count(False)
        keep = [[float(k)] * len(s["mask"]) for k, s in zip(keep_row, seqs)]
        config = {
            "type": "sequence_mask",
            "estimator": estimator,
            "reduction": reduction,
            "low": -0.3,
            "high": 0.15,
        }
        expected, _ = reference.aggregate(
            seqs, [reference.clip(s) for s in seqs], "token-mean", weights=keep, keep=keep
        )
        assert loss_of(algorithm(config), [flat(seqs)])[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert 0 < dropped < 60


@pytest.mark.parametrize("correction", EVERY, ids=label)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 4))
def test_a_correction_does_not_depend_on_the_split(correction, seed, cut):
    seqs = random_sequences(seed, num_seqs=5)
    whole, gradient = loss_of(algorithm(correction), [flat(seqs)])
    parts, gradients = loss_of(algorithm(correction), [flat(seqs[:cut]), flat(seqs[cut:])])
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert gradients.tolist() == pytest.approx(gradient.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("correction", EVERY, ids=label)
def test_without_mismatch_every_weight_is_1(correction):
    seqs = random_sequences(8, num_seqs=4, fresh=True)
    for seq in seqs:
        seq["lag"] = [0] * len(seq["lag"])
    expected, gradient = loss_of(algorithm("none"), [flat(seqs)])
    loss, found = loss_of(algorithm(correction), [flat(seqs)])
    assert loss == pytest.approx(expected)
    assert found.tolist() == pytest.approx(gradient.tolist())


def test_a_normalised_correction_has_mean_weight_1_over_all_ranks():
    seqs = random_sequences(21, num_seqs=6)
    algo = algorithm({"type": "tis", "high": 1.2, "normalise": True})
    assert Need.STATISTICS in algo.needs
    shares = [flat(seqs[:2]), flat(seqs[2:])]
    figures = Ranks(2).run(lambda rank, reduce: algo.statistics([shares[rank]], reduce))
    assert figures[0] == figures[1]
    weights = [algo.correction.weights(_with(batch, figures[0])).weights_N * batch.mask_N for batch in shares]
    count = sum(float(batch.mask_N.sum()) for batch in shares)
    assert sum(float(w.sum()) for w in weights) / count == pytest.approx(1.0)


@pytest.mark.parametrize("kind", [{"type": "tis", "high": 1.5}, {"type": "mis", "high": 1.5}], ids=label)
def test_a_normalised_weight_of_sequences_has_mean_1_over_sequences(kind):
    """A sequence's weight counts once, however many tokens bear it."""
    seqs = random_sequences(21, num_seqs=6)
    algo = algorithm({**kind, "level": "sequence", "normalise": True})
    shares = [flat(seqs[:2]), flat(seqs[2:])]
    figures = Ranks(2).run(lambda rank, reduce: algo.statistics([shares[rank]], reduce))
    found = []
    for batch in shares:
        weights = algo.correction.weights(_with(batch, figures[0])).weights_N
        for s in range(batch.num_seqs):
            of_sequence = weights[(batch.seq_N == s) & (batch.mask_N > 0)]
            if of_sequence.numel():
                found.append(float(of_sequence[0]))
                assert (of_sequence == of_sequence[0]).all()
    assert sum(found) / len(found) == pytest.approx(1.0)
    alone = algo.correction.weights(flat(seqs)).weights_N  # a micro-batch that stands for the batch
    assert alone[flat(seqs).mask_N > 0].unique().tolist() == pytest.approx(sorted(set(found)))


def test_sequences_are_masked_from_above_only_unless_told():
    """The product of a sequence's ratios falls below ½ by its length alone."""
    assert algorithm({"type": "mis"}).correction.bounds == (0.5, 2.0)
    assert algorithm({"type": "mis", "level": "sequence"}).correction.bounds == (0.0, 2.0)
    assert algorithm({"type": "mis", "level": "sequence", "low": 0.1}).correction.bounds == (0.1, 2.0)
    wide, narrow, lag = {"type": "tis", "high": 8.0}, {"type": "mis"}, {"type": "lag_limit", "max_lag": 2}
    assert algorithm({"type": "chain", "parts": [lag, wide]}).correction.bounds == (0.125, 8.0)
    assert algorithm({"type": "chain", "parts": [lag, wide, narrow]}).correction.bounds == (0.5, 2.0)
    assert algorithm({"type": "chain", "parts": [lag]}).correction.bounds == (0.5, 2.0)


def test_masking_without_renormalising_keeps_the_denominator():
    seqs = random_sequences(3, num_seqs=4)
    config = {"type": "mis", "low": 0.99, "high": 1.01}
    kept = algorithm(config).policy_loss(flat(seqs))
    assert float(kept.denominator) == sum(sum(s["mask"]) for s in seqs)
    dropped = algorithm({**config, "renormalise": True}).policy_loss(flat(seqs))
    assert float(dropped.denominator) < float(kept.denominator)


def test_old_tokens_are_refused_and_young_ones_of_the_same_sequence_kept():
    seqs = random_sequences(4, num_seqs=4)
    keep = [[float(lag <= 1) for lag in s["lag"]] for s in seqs]
    expected, _ = reference.aggregate(
        seqs, [reference.clip(s) for s in seqs], "token-mean", weights=keep, keep=keep
    )
    loss, gradient = loss_of(algorithm({"type": "lag_limit", "max_lag": 1}), [flat(seqs)])
    assert loss == pytest.approx(expected)
    assert gradient[torch.tensor([lag > 1 for s in seqs for lag in s["lag"]])].abs().sum() == 0


def test_against_the_current_policy_reinforce_with_a_weight_is_aipo():
    """min(π/μ, δ)·A·∇log π either way, and neither needs old log-probabilities."""
    seqs = random_sequences(12, num_seqs=4)
    tis = {"type": "tis", "policy": "current", "high": 1.2}
    weighed = Algorithm(AlgorithmConfig(loss="reinforce", correction=tis, aggregation="token-mean"))
    aipo = Algorithm(
        AlgorithmConfig(loss={"type": "aipo", "delta": 1.2, "keep_gradient": True}, aggregation="token-mean")
    )
    assert weighed.needs == aipo.needs == frozenset()
    assert torch.allclose(loss_of(weighed, [flat(seqs)])[1], loss_of(aipo, [flat(seqs)])[1])


def test_a_loss_that_holds_the_ratio_refuses_a_correction_on_top():
    for loss in ("aipo", "decoupled"):
        with pytest.raises(ConfigError, match="count twice"):
            Algorithm(AlgorithmConfig(advantage="grpo", loss=loss, correction="tis"))


MASKS = [
    {"type": "lag_limit", "max_lag": 2},
    {"type": "sequence_mask", "high": 0.08},
    {"type": "mis", "low": 0.8, "high": 1.3, "weigh": False},
]


@pytest.mark.parametrize("mask", [*MASKS, {"type": "chain", "parts": MASKS}], ids=label)
def test_beside_a_loss_that_holds_the_ratio_tokens_may_still_be_left_out(mask):
    seqs = random_sequences(3, num_seqs=5)
    algo = Algorithm(AlgorithmConfig(advantage="grpo", loss="aipo", correction=mask, aggregation="token-sum"))
    kept = algo.correction.weights(flat(seqs)).weights_N
    assert set(kept.tolist()) == {0.0, 1.0}
    whole = Algorithm(AlgorithmConfig(advantage="grpo", loss="aipo", aggregation="token-sum"))
    assert torch.equal(loss_of(algo, [flat(seqs)])[1], kept * loss_of(whole, [flat(seqs)])[1])


def test_two_normalised_corrections_in_a_chain_are_refused():
    twice = {
        "type": "chain",
        "parts": [{"type": "tis", "normalise": True}, {"type": "mis", "normalise": True}],
    }
    with pytest.raises(ConfigError, match="only one correction"):
        algorithm(twice)


# --- what is always measured ------------------------------------------------------------------------------


def reduced(results):
    """As a trainer reduces over micro-batches and ranks."""
    out = {}
    for name in results[0].metrics:
        found = [r.metrics[name] for r in results]
        if found[0].is_max:
            out[name] = max(float(m.total) for m in found)
        else:
            out[name] = float(sum(m.total for m in found) / divisor(sum(m.weight for m in found)))
    return finish_metrics(out)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 3))
def test_mismatch_and_ess_are_reported_whatever_the_correction(seed, cut):
    seqs = random_sequences(seed, num_seqs=4)
    x = [o - m for s in seqs for o, m in zip(reference.trained(s, "old"), reference.trained(s, "mu"))]
    w = [w for s in seqs for w, m in zip(reference.token_ratio(s), s["mask"]) if m]
    expected = {
        "mismatch/abs_mean": reference.mean(abs(v) for v in x),
        "mismatch/abs_max": max(abs(v) for v in x),
        "mismatch/kl": -reference.mean(x),
        "mismatch/outside": reference.mean(float(not 0.5 <= v <= 2.0) for v in w),
        "mismatch/ess": sum(w) ** 2 / (len(w) * sum(v * v for v in w)),
    }
    algo = algorithm("none")
    found = reduced([algo.policy_loss(flat(seqs[:cut])), algo.policy_loss(flat(seqs[cut:]))])
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert found["mismatch/kl_k3"] >= 0


def test_the_effective_sample_size_of_equal_weights_is_1():
    found = reduced([algorithm("tis").policy_loss(flat(random_sequences(1, fresh=True)))])
    assert found["mismatch/ess"] == pytest.approx(1.0)
    assert found["correction/ess"] == pytest.approx(1.0)
