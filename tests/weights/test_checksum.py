"""The checksum sees what can go wrong with bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.weights.checksum import COLUMNS, SAMPLE_WORDS, checksum, sampled_checksum


def random_bytes(words: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (8 * words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@settings(max_examples=80, deadline=None)
@given(words=st.integers(1, 3 * COLUMNS), at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_any_single_flipped_bit_changes_it(words: int, at: int, bit: int) -> None:
    data = random_bytes(words)
    before = checksum(data)
    data[at % data.numel()] ^= 1 << bit
    assert checksum(data) != before


@settings(max_examples=60, deadline=None)
@given(words=st.integers(2, 3 * COLUMNS), a=st.integers(0, 10**9), b=st.integers(0, 10**9))
def test_two_words_that_change_places_change_it(words: int, a: int, b: int) -> None:
    data = random_bytes(words).view(torch.int64)
    a, b = a % words, b % words
    swapped = data.clone()
    swapped[[a, b]] = data[[b, a]]
    if not torch.equal(data, swapped):
        assert checksum(data.view(torch.uint8)) != checksum(swapped.view(torch.uint8))


def test_length_counts_even_where_the_bytes_are_zero() -> None:
    assert checksum(torch.zeros(64, dtype=torch.uint8)) != checksum(torch.zeros(128, dtype=torch.uint8))


def test_it_is_the_formula_of_its_docstring() -> None:
    """Computed again with Python's own integers, word by word."""
    from rill.weights import checksum as module

    words = 2 * COLUMNS + 77
    data = random_bytes(words)
    a = module._odd_weights(COLUMNS, 1, data.device).tolist()
    b = module._odd_weights(3, 2, data.device).tolist()
    values = data.view(torch.int64).tolist()
    across = sum(a[i % COLUMNS] * x for i, x in enumerate(values))
    down = sum(b[i // COLUMNS] * x for i, x in enumerate(values))
    assert checksum(data) == module._mix(across + module._mix(down) + 8 * words)
    assert all(w % 2 for w in a + b) and len(set(a + b)) == len(a) + len(b)


def test_the_sample_moves_with_the_version_and_sees_large_damage() -> None:
    data = random_bytes(1 << 17)
    assert sampled_checksum(data, 1) != sampled_checksum(data, 2)
    broken = data.clone()
    broken[: data.numel() // 2] = 0
    assert all(sampled_checksum(data, v) != sampled_checksum(broken, v) for v in range(10))


@pytest.mark.parametrize("version", [1, 2, 99])
def test_the_sample_sees_any_damage_as_long_as_its_stride(version: int) -> None:
    data = random_bytes(1 << 16)
    stride = 8 * max(1, (1 << 16) // SAMPLE_WORDS)
    for start in (0, 8 * 777, data.numel() - stride):
        broken = data.clone()
        broken[start : start + stride] ^= 255
        assert sampled_checksum(data, version) != sampled_checksum(broken, version), start
