"""The sampler's numbers and filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.inference.native.sampler import SamplingBatch, filter_logits, hash_seed, sample, uniforms


def batch(rows: int, **columns: object) -> SamplingBatch:
    values = {"temperature_S": 1.0, "top_k_S": 0, "top_p_S": 1.0, "min_p_S": 0.0, "uniform_S": 0.5} | columns
    kinds = {"top_k_S": np.int32, "uniform_S": np.float64}
    return SamplingBatch(
        **{
            k: np.broadcast_to(np.asarray(v, dtype=kinds.get(k, np.float32)), rows).copy()
            for k, v in values.items()
        }
    )


def test_uniforms_are_spread_evenly_over_seeds_and_positions() -> None:
    seeds = np.array([hash_seed(s) for s in range(200)], dtype=np.uint64)
    numbers = uniforms(np.repeat(seeds, 100), np.tile(np.arange(100), 200))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts / 1000 - 1).max() < 0.12
    table = numbers.reshape(200, 100)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k_S": 2}, [0, 1]),
        ({"top_p_S": 0.6}, [0]),
        ({"top_p_S": 0.7}, [0, 1]),
        ({"min_p_S": 0.2}, [0, 1]),
        ({"top_k_S": 3, "top_p_S": 0.95}, [0, 1, 2]),
        ({"top_k_S": 100}, [0, 1, 2, 3]),
    ],
)
def test_filters_keep_what_they_say(options: dict[str, float], kept: list[int]) -> None:
    probs = torch.tensor([[0.64, 0.235, 0.085, 0.04]])
    found = filter_logits(probs.log(), batch(1, **options))
    assert torch.isfinite(found[0]).nonzero()[:, 0].tolist() == kept


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).repeat(3, 1)
    tokens, _ = sample(logits, batch(3, uniform_S=[0.0, 0.5, 1 - 2**-53]))
    assert tokens.tolist() == [1, 3, 3]


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")]).repeat(20_000, 1)
    uniform_S = (np.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = sample(logits.clone(), batch(20_000, temperature_S=0.5, uniform_S=uniform_S))
    expected = (logits[0] / 0.5).log_softmax(-1)
    torch.testing.assert_close(
        torch.bincount(tokens, minlength=5) / 20_000, expected.exp(), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_top_p_alone_draws_until_a_token_is_kept_and_follows_the_filtered_distribution(top_p: float) -> None:
    rows = 20_000
    logits = torch.tensor([0.3, 2.0, -1.0, 1.0, 0.0, -2.0, 0.3]).repeat(rows, 1)
    seeds = np.array([hash_seed(s) for s in range(rows)], dtype=np.uint64)
    asked = batch(rows, top_p_S=top_p, uniform_S=uniforms(seeds, np.zeros(rows, dtype=np.int64)))
    assert asked.is_redrawn_S.all()
    expected = filter_logits(logits[:1].clone(), batch(1, top_p_S=top_p))
    tokens, logprobs = sample(logits.clone(), asked)
    shares = np.bincount(tokens.numpy(), minlength=7) / rows
    np.testing.assert_allclose(shares, expected.softmax(-1)[0], atol=0.012)
    assert (shares[expected[0].numpy() == -np.inf] == 0).all(), "never one that is filtered out"
    np.testing.assert_allclose(logprobs, logits[0].log_softmax(-1)[tokens], atol=1e-5)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    tokens, _ = sample(torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]]), batch(2, temperature_S=0.0))
    assert tokens.tolist() == [1, 0]


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(70, 1003, generator=torch.Generator().manual_seed(0)) * 3
    uniform_S = np.random.default_rng(0).random(70)
    tokens, logprobs = sample(logits.clone(), batch(70, temperature_S=0.7, uniform_S=uniform_S))
    for start, end in ((0, 1), (69, 70), (3, 40), (17, 70)):
        part = batch(end - start, temperature_S=0.7, uniform_S=uniform_S[start:end])
        found, reported = sample(logits[start:end].clone(), part)
        assert torch.equal(found, tokens[start:end]) and torch.equal(reported, logprobs[start:end])
