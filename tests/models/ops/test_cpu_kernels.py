"""The compiled CPU kernels against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.inference.native.sampler import SamplingBatch, sample
from rill.models.decode.attention_paged import PagedBatch
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.torch_kernels import TorchKernels, attend_one

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture
def kernels() -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 128), (20, 1, 16), (6, 2, 40)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(0, 0.0, False), (11, 0.0, False), (0, 5.0, False), (11, 0.0, True)]
)
def test_attention_over_pages_equals_attention_over_gathered_keys(
    kernels: CpuKernels,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    softcap: float,
    has_sinks: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(20, 8, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    lengths, query_lens = [70, 1, 33, 40], [1, 1, 12, 40]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    tables = torch.stack([torch.randperm(19, generator=generator)[:9] + 1 for _ in lengths]).int()
    batch = PagedBatch(
        slots_N=torch.zeros(0, dtype=torch.int64),
        query_starts_B1=starts,
        context_lens_B=torch.tensor(lengths, dtype=torch.int32),
        block_tables_BM=tables,
        num_decodes=2,
        max_query_len=40,
        max_context_len=70,
    )
    query = torch.randn(sum(query_lens), heads, dim, generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator).to(dtype) if has_sinks else None
    rows = []
    for row, (length, count) in enumerate(zip(lengths, query_lens, strict=True)):
        key, value = (x[tables[row].long()].flatten(0, 1)[:length] for x in (keys, values))
        one = query[starts[row] : starts[row] + count]
        rows.append(attend_one(one, key, value, 0.2, window, softcap, sinks))
    for ops in (TorchKernels(), kernels):
        found = ops.attend(
            query, keys, values, batch, scale=0.2, window=window, softcap=softcap, sinks_H=sinks
        )
        torch.testing.assert_close(found, torch.cat(rows), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_activation_and_rotation_are_those_of_torch(kernels: CpuKernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    hidden, addend, weight, gate_up = randn(5, 48), randn(5, 48), randn(48), randn(5, 32)
    heads, kv_heads, dim = 4, 2, 16
    qkv, q_norm, k_norm, cos, sin = randn(5, 8 * dim), randn(dim), randn(dim), randn(9, dim), randn(9, dim)
    positions, slots = torch.tensor([3, 0, 8, 1, 2]), torch.tensor([4, 9, 2, 0, 7])
    results = []
    for ops in (TorchKernels(), kernels):
        stream, turned = hidden.clone(), qkv.clone()
        keys, values = (
            torch.zeros(3, 4, kv_heads, dim, dtype=dtype),
            torch.zeros(3, 4, kv_heads, dim, dtype=dtype),
        )
        normed = [ops.add_norm(stream, addend, weight, 1e-5, gemma=gemma) for gemma in (False, True)]
        activated = [ops.act_mul(gate_up, gelu=gelu) for gelu in (False, True)]
        ops.rope_store(turned, cos, sin, positions, slots, q_norm, k_norm, 1e-5, keys, values, heads)
        query = turned[:, : heads * dim]
        results.append([stream, *normed, *activated, query, keys, values])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_sampling_follows_the_distribution(kernels: CpuKernels) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")]).repeat(20_000, 1)
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, logprobs = kernels.sample(logits, torch.full((20_000,), 0.5), uniform)
    expected = (logits[0] / 0.5).softmax(-1)
    counts = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(counts, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs, (logits[0] / 0.5).log_softmax(-1)[tokens], atol=1e-6, rtol=1e-6)


def test_greedy_takes_the_first_of_equal_logits(kernels: CpuKernels) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    tokens, _ = kernels.sample(logits, torch.zeros(2), torch.full((2,), 0.9, dtype=torch.float64))
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 512, 1000])
def test_filtered_sampling_is_that_of_the_torch_sampler(
    kernels: CpuKernels, dtype: torch.dtype, vocab: int
) -> None:
    rng = np.random.default_rng(vocab)
    rows = 400
    logits = torch.from_numpy(rng.normal(0, 3, size=(rows, vocab))).to(dtype)
    logits[::5, 1:3] = float("-inf")
    batch = SamplingBatch(
        temperature_S=rng.choice([0.0, 0.5, 1.0, 1.5], size=rows).astype(np.float32),
        top_k_S=rng.choice([0, 1, 3, 50, 5000], size=rows).astype(np.int32),
        top_p_S=rng.choice([1.0, 0.999, 0.9, 0.4], size=rows).astype(np.float32),
        min_p_S=rng.choice([0.0, 0.02, 0.3], size=rows).astype(np.float32),
        uniform_S=rng.random(rows),
    )
    expected_tokens, expected_logprobs = sample(logits.float().clone(), batch)
    filters = tuple(torch.from_numpy(x) for x in (batch.top_k_S, batch.top_p_S, batch.min_p_S))
    tokens, logprobs = kernels.sample(
        logits,
        torch.from_numpy(batch.temperature_S),
        torch.from_numpy(batch.uniform_S),
        filters=(filters[0], filters[1], filters[2]),
    )
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)
