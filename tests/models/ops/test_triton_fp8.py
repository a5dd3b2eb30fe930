"""Kernels that write and read 8 bits, against plain torch. On the GPU; with TRITON_INTERPRET=1 anywhere."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from rill.models.decode.attention_paged import CacheRows, LayerCache, PagedBatch
from rill.models.decode.decode_work import DecodeWork, work_in_runs
from rill.models.decode.structure import HeadNorms, Norm
from rill.models.eager import ScoreRule
from rill.models.ops.fp8 import FP8, LARGEST, Fp8Rows, ProductScales
from rill.models.ops.torch_kernels import TorchKernels
from tests.models.ops.reference import attend_one

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
"""The interpreter's products of bfloat16 are wrong."""
ROUNDING = 0.15 if IS_INTERPRETED else 0.03
"""Relative error of numbers in 8 bits; the interpreter rounds some of them to half."""


def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return (torch.randn(*size, generator=generator) * scale).to(DEVICE, DTYPE)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found.float()).all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def rows_of(x: torch.Tensor) -> Fp8Rows:
    """Made by torch."""
    rows = Fp8Rows.of(x.cpu())
    return Fp8Rows(*(t.to(DEVICE) for t in rows))


def written(rows: object) -> torch.Tensor:
    assert isinstance(rows, Fp8Rows)
    return rows.wide(torch.float32)


def kernels(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 32) -> object:
    from rill.models.ops.triton_decode import DecodeAttention
    from rill.models.ops.triton_kernels import TritonKernels

    decode = DecodeAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_rows=8,
        device=torch.device(DEVICE),
    )
    return TritonKernels(decode)


@pytest.mark.parametrize("size", [48, 1536])
def test_rows_are_quantised_as_torch_does_it_and_zeros_stay_zeros(size: int) -> None:
    from rill.models.ops.triton_fp8 import quantize_into

    x = randn(5, size) * torch.tensor([1e-3, 1.0, 0.0, 300.0, 5.0], device=DEVICE, dtype=DTYPE)[:, None]
    found, wanted = Fp8Rows.empty(x.shape, x.device), rows_of(x)
    quantize_into(x, *found)
    assert torch.allclose(found.scales_B, wanted.scales_B, rtol=1e-6)
    assert error(written(found), x) < ROUNDING and bool((written(found)[2] == 0).all())
    if not IS_INTERPRETED:
        assert torch.equal(found.values_BK.float(), wanted.values_BK.float())


@pytest.mark.skipif(IS_INTERPRETED, reason="there is no library to compare with")
@pytest.mark.parametrize("rows", [1, 100, 256, 300])
def test_a_product_in_parts_is_the_product(rows: int) -> None:
    x, weight = Fp8Rows.of(randn(rows, 4480)), Fp8Rows.of(randn(1008, 4480), is_weight=True)
    parts = x.product_in_parts(weight.values_BK)
    assert parts is not None and len(parts) > 1
    assert error(parts.float().sum(0), x.product(weight.values_BK)) < 1e-2
    assert x.product_in_parts(randn(20_000, 4480).to(FP8)) is None, "it fills the device by itself"


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_norm_reads_a_product_without_its_scales_and_writes_8_bits(gemma: bool, has_bias: bool) -> None:
    hidden, raw, norm = randn(3, 96), randn(3, 96, scale=1e4), Norm(randn(96), 1e-6, gemma)
    scales = ProductScales(
        torch.rand(3, device=DEVICE) * 1e-2,
        torch.full((96,), 3e-3, device=DEVICE),
        randn(96) if has_bias else None,
    )
    whole = hidden.clone()
    wanted = TorchKernels().add_norm(whole, scales.applied(raw), norm)
    for is_last in (False, True):
        mine = hidden.clone()
        norm.is_last = is_last
        found = kernels().add_norm(mine, raw, norm, scales)  # type: ignore[attr-defined]
        assert error(mine, whole) < 1e-2
        assert error(found, wanted) < 1e-2 if is_last else error(written(found), wanted) < ROUNDING


@pytest.mark.parametrize(("gelu", "width"), [(False, 80), (True, 80), (False, 4112)])
def test_an_activation_reads_a_product_without_its_scales_and_writes_8_bits(gelu: bool, width: int) -> None:
    raw = randn(3, 2 * width, scale=1e4)
    scales = ProductScales(
        torch.rand(3, device=DEVICE) * 1e-2,
        torch.tensor([3e-3, 7e-3], device=DEVICE).repeat_interleave(width),
        None,
    )
    wanted = TorchKernels().act_mul(scales.applied(raw), gelu=gelu)
    found = kernels().act_mul(raw, scales, gelu=gelu)  # type: ignore[attr-defined]
    assert error(written(found), wanted) < ROUNDING


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_keys_and_values_go_into_a_cache_of_8_bits_and_none_is_infinite(
    has_norm: bool, is_scaled: bool
) -> None:
    heads, kv_heads, dim = 4, 2, 32
    width = (heads + 2 * kv_heads) * dim
    raw, cos, sin = randn(3, width, scale=200.0), randn(10, dim), randn(10, dim)
    positions = torch.tensor([1, 4, 7], device=DEVICE, dtype=torch.int32)
    slots = torch.tensor([3, 17, 40], device=DEVICE, dtype=torch.int32)
    norms = HeadNorms(*(Norm(randn(dim), 1e-6, False) for _ in range(2))) if has_norm else None
    parts = torch.tensor([heads, kv_heads, kv_heads], device=DEVICE) * dim  # a weight each
    weight_N = torch.tensor([0.3, 0.9, 0.5], device=DEVICE).repeat_interleave(parts)
    scales = ProductScales(torch.rand(3, device=DEVICE), weight_N, randn(width))
    whole = scales.applied(raw) if is_scaled else raw.clone()
    keys, values = (torch.zeros(3, 16, kv_heads, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
    rows = CacheRows(cos, sin, positions.long(), slots.long(), keys, values)
    TorchKernels().rope_store(whole, rows, heads, norms)
    keys8, values8 = (torch.zeros(3, 16, kv_heads, dim, device=DEVICE, dtype=FP8) for _ in range(2))
    found = raw.clone()
    kernels().rope_store(  # type: ignore[attr-defined]
        found,
        CacheRows(cos, sin, positions, slots, keys8, values8),
        heads,
        norms,
        *([scales] if is_scaled else []),
    )
    queries = heads * dim
    assert error(found[:, :queries], whole[:, :queries]) < 1e-2
    assert error(keys8.float(), keys.clamp(-LARGEST, LARGEST)) < ROUNDING + 0.02
    assert error(values8.float(), values.clamp(-LARGEST, LARGEST)) < ROUNDING + 0.02


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("num_out", "num_in", "num_parts"), [(96, 512, 2), (2048, 256, 1)])
def test_few_rows_of_8_bits_times_a_weight_of_8_bits(
    rows: int, num_out: int, num_in: int, num_parts: int
) -> None:
    from rill.models.ops.triton_skinny import ProductShape, product

    if IS_INTERPRETED and num_out > 96:
        pytest.skip("takes the interpreter too long")
    x, weight = rows_of(randn(rows, num_in)), rows_of(randn(num_out, num_in))
    wanted = written(x).double() @ written(weight).double().T
    shape = ProductShape(num_parts, 64, 128, 3, 4, 1024)
    parts = product(x, weight.values_BK, shape, dtype=torch.float32, scales_N=weight.scales_B)
    assert parts.shape[0] == num_parts and error(parts.sum(0), wanted) < 2e-3
    shape = ProductShape(1, 64, 128, 4, 4, 0)
    (found,) = product(x, weight.values_BK, shape, dtype=DTYPE, scales_N=weight.scales_B, is_gelu=False)
    gate, up = wanted.chunk(2, dim=1)
    assert error(found, torch.nn.functional.silu(gate) * up) < 2e-2


@pytest.mark.parametrize("has_post_norm", [False, True])
def test_parts_are_added_normed_and_written_in_8_bits(has_post_norm: bool) -> None:
    from rill.models.ops.triton_kernels import add_norm

    hidden, bias, norm = randn(5, 96), randn(96), Norm(randn(96), 1e-6, False)
    post = norm if has_post_norm else None
    arguments = (randn(3, 5, 96).float(), ProductScales(None, None, bias), post, norm)
    plain, narrow = hidden.clone(), hidden.clone()
    wanted = add_norm(plain, *arguments, to_fp8=False)
    found = add_norm(narrow, *arguments, to_fp8=True)
    assert isinstance(wanted, torch.Tensor) and torch.equal(plain, narrow)
    assert error(written(found), wanted) < ROUNDING


def test_products_without_scales_are_the_tensor_cores() -> None:
    x, weight = rows_of(randn(33, 256)), rows_of(randn(64, 256))
    y = ProductScales(x.scales_B, weight.scales_B, None).applied(x.product(weight.values_BK))
    assert error(y, written(x).double() @ written(weight).double().T) < 1e-2


@pytest.mark.parametrize("window", [0, 40])
@torch.no_grad()
def test_attention_over_keys_and_values_of_8_bits(window: int) -> None:
    """Single tokens, and a prompt's second part."""
    heads, kv_heads, dim, block = 4, 2, 32, 16
    lengths = np.array([5, 70, 90], dtype=np.int32)  # the last has 20 queries
    counts = -(-lengths // block)
    keys, values = (randn(int(counts.sum()) + 1, block, kv_heads, dim, scale=s).to(FP8) for s in (1.0, 0.05))
    tables = torch.zeros(3, int(counts.max()), dtype=torch.int32)
    ends = np.cumsum(counts)
    for row, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True)):
        tables[row, :count] = torch.arange(end - count + 1, end + 1)
    query = randn(22, heads * dim)
    entries, pieces, runs = work_in_runs(lengths[:2], np.arange(2, dtype=np.int32), 8)
    batch = PagedBatch(
        slots_N=torch.zeros(22, dtype=torch.int64, device=DEVICE),
        query_starts_B1=torch.tensor([0, 1, 2, 22], dtype=torch.int32, device=DEVICE),
        context_lens_B=torch.from_numpy(lengths).to(DEVICE),
        block_tables_BM=tables.to(DEVICE),
        num_decodes=2,
        table_rows_B=torch.arange(3, dtype=torch.int32, device=DEVICE),
        decode_work=DecodeWork(
            torch.from_numpy(entries).to(DEVICE), runs, torch.from_numpy(pieces).to(DEVICE)
        ),
        prefill_tiles=torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE),
    )
    rule = ScoreRule(dim**-0.5, window)
    out = kernels().attend(  # type: ignore[attr-defined]
        query, heads, LayerCache(keys, values), batch, rule
    )
    for row, (begin, end) in enumerate(((0, 1), (1, 2), (2, 22))):
        blocks = tables[row, : counts[row]].long().to(DEVICE)
        key, value = (c.float()[blocks].flatten(0, 1)[: lengths[row]].double() for c in (keys, values))
        one = query[begin:end].view(-1, heads, dim).double()
        assert error(out[begin:end], attend_one(one, key, value, rule)) < 1e-2
