"""The compiled CPU kernels against torch."""

from __future__ import annotations

import pytest
import torch

from rill.models.decode.attention_paged import CacheRows, LayerCache, PagedBatch
from rill.models.decode.structure import HeadNorms, Norm
from rill.models.eager import ScoreRule
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.torch_kernels import TorchKernels
from tests.models.ops.reference import attend_one

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
    )
    query = torch.randn(sum(query_lens), heads, dim, generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator).to(dtype) if has_sinks else None
    rule = ScoreRule(0.2, window, softcap, sinks)
    rows = []
    for row, (length, count) in enumerate(zip(lengths, query_lens, strict=True)):
        key, value = (x[tables[row].long()].flatten(0, 1)[:length] for x in (keys, values))
        one = query[starts[row] : starts[row] + count]
        rows.append(attend_one(one, key, value, rule))
    for ops in (TorchKernels(), kernels):
        found = ops.attend(query.flatten(1), query.shape[1], LayerCache(keys, values), batch, rule)
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
        normed = [ops.add_norm(stream, addend, Norm(weight, 1e-5, gemma)) for gemma in (False, True)]
        activated = [ops.act_mul(gate_up, gelu=gelu) for gelu in (False, True)]
        rows = CacheRows(cos, sin, positions, slots, keys, values)
        ops.rope_store(turned, rows, heads, HeadNorms(Norm(q_norm, 1e-5, False), Norm(k_norm, 1e-5, False)))
        query = turned[:, : heads * dim]
        results.append([stream, *normed, *activated, query, keys, values])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
