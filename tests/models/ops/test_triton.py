"""The CUDA kernels one by one, against plain torch in higher precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.models.decode.attention_paged import LayerCache
from rill.models.decode.decode_work import DecodeWork, Run, pieces_of, shared_work, work_in_runs, work_list
from rill.models.eager import ScoreRule
from tests.models.ops.reference import attend_one

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap", "max_rows"), [(0, 0.0, 16), (40, 0.0, 16), (0, 5.0, 3)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_many", [False, True])
@torch.no_grad()
def test_decode_attention_of_unequal_lengths(
    dtype: torch.dtype,
    window: int,
    softcap: float,
    max_rows: int,
    has_sinks: bool,
    is_many: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rill.models.ops import triton_decode
    from rill.models.ops.triton_decode import DecodeAttention

    monkeypatch.setattr(triton_decode, "FEW_ROWS", 0)  # few or many: their pieces are joined in another way
    generator = torch.Generator("cuda").manual_seed(0)
    heads, kv_heads, dim, block = 12, 2, 128, 16
    lengths = np.array([1, 5, 64, 511, 512, 513, 300, 4096, 5000], dtype=np.int32)
    counts = -(-lengths // block)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    keys, values = (randn(int(counts.sum()) + 1, block, kv_heads, dim) for _ in range(2))
    tables = torch.zeros(len(lengths), int(counts.max()), dtype=torch.int32, device="cuda")
    order = torch.randperm(int(counts.sum()), generator=generator, device="cuda").int() + 1
    ends = np.cumsum(counts)
    for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
        tables[row, :count] = order[end - count : end]
    query = randn(len(lengths), (heads + 2 * kv_heads) * dim)
    sinks = randn(heads) if has_sinks else None
    attend = DecodeAttention(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, max_rows=max_rows, device=torch.device("cuda")
    )
    attend.is_invariant = not is_many
    rows = np.arange(len(lengths), dtype=np.int32)
    entries, pieces, runs = work_in_runs(lengths, rows, max_rows)
    work = DecodeWork(torch.from_numpy(entries).cuda(), runs, torch.from_numpy(pieces).cuda())
    rule = ScoreRule(dim**-0.5, window, softcap, sinks)
    found = []
    for _ in range(2):  # the second launch finds the parts that the first one left
        out = torch.full((len(lengths), heads, dim), float("nan"), dtype=dtype, device="cuda")
        attend(query, LayerCache(keys, values), tables, work, out, rule)
        found.append(out)
    assert torch.equal(*found)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = tables[row, :count].long()
        key, value = (c[blocks].flatten(0, 1)[:length].double() for c in (keys, values))
        one = query[row : row + 1, : heads * dim].view(1, heads, dim).double()
        expected = attend_one(one, key, value, rule)[0]
        assert error(found[0][row], expected) < TOLERANCE[dtype], (row, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (5.0, True)])
@torch.no_grad()
def test_what_rows_share_is_read_once_and_counts_for_each(
    dtype: torch.dtype, softcap: float, has_sinks: bool
) -> None:
    from rill.models.ops.triton_decode import DecodeAttention

    generator = torch.Generator("cuda").manual_seed(0)
    heads, kv_heads, dim, block = 12, 2, 128, 16

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    prefixes = np.array([0, 0] + [528] * 5 + [4096] * 20, dtype=np.int32)
    lengths = prefixes + np.array([40, 900, *range(1, 24), 600, 3000], dtype=np.int32)
    first_of = np.array([0, 1] + [2] * 5 + [7] * 20)
    count = int(-(-lengths.max() // block))
    keys, values = (randn(len(lengths) * count + 1, block, kv_heads, dim) for _ in range(2))
    tables = torch.arange(1, len(lengths) * count + 1, dtype=torch.int32, device="cuda").view(-1, count)
    for row, first in enumerate(first_of):
        tables[row, : prefixes[row] // block] = tables[first, : prefixes[row] // block]
    query, sinks = randn(len(lengths), (heads + 2 * kv_heads) * dim), randn(heads) if has_sinks else None
    attend = DecodeAttention(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, max_rows=64, device=torch.device("cuda")
    )
    rows = np.arange(len(lengths), dtype=np.int32)
    shared = shared_work(lengths, rows, prefixes, first_of.astype(np.int32))
    assert shared is not None and len(shared.members) == 3
    entries = np.concatenate(
        [work_list(lengths, rows, None, shared.tokens_B), np.zeros((3, 8), dtype=np.int32)]
    )
    work = DecodeWork(
        torch.from_numpy(entries).cuda(),
        (Run(0, len(lengths), 0, len(entries)),),
        torch.from_numpy(pieces_of(entries[:-3], len(lengths))).cuda(),
        members=torch.from_numpy(shared.members).cuda(),
        shared=torch.from_numpy(shared.entries).cuda(),
    )
    out = torch.full((len(lengths), heads, dim), float("nan"), dtype=dtype, device="cuda")
    rule = ScoreRule(dim**-0.5, 0, softcap, sinks)
    attend(query, LayerCache(keys, values), tables, work, out, rule)
    for row, length in enumerate(lengths.tolist()):
        key, value = (c[tables[row].long()].flatten(0, 1)[:length].double() for c in (keys, values))
        one = query[row : row + 1, : heads * dim].view(1, heads, dim).double()
        expected = attend_one(one, key, value, rule)[0]
        assert error(out[row], expected) < TOLERANCE[dtype], (row, length)


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("size", [96, 5000])
def test_tokens_are_looked_up(rows: int, size: int) -> None:
    from rill.models.ops.triton_decode import DecodeAttention
    from rill.models.ops.triton_kernels import TritonKernels

    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 50, (rows,), generator=generator, device="cuda", dtype=torch.int32)
    weight = torch.randn(50, size + 8, generator=generator, device="cuda").bfloat16()[:, :size]
    decode = DecodeAttention(num_heads=4, num_kv_heads=2, head_dim=32, max_rows=8, device=ids.device)
    assert torch.equal(TritonKernels(decode).embed(ids, weight), weight[ids.long()])


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_steps_inputs_are_those_of_its_buffer_with_the_newest_tokens(rows: int) -> None:
    from rill.models.ops.triton_kernels import take_inputs

    generator, stride, num_words = torch.Generator().manual_seed(0), -(-rows // 32) * 32, 4000
    ring = torch.randint(0, 9, (3, num_words), generator=generator, dtype=torch.int32)
    step, last = ring[1], torch.arange(20, 29, dtype=torch.int32)
    step[:rows] = torch.randint(-3, 50, (rows,), generator=generator)
    places = step[3 * stride :][:rows]
    places[:] = torch.randperm(500, generator=generator)[:rows]
    places[::2] = -1
    tables = torch.zeros(500, dtype=torch.int32)
    tables[places[1::2].long()] = step[5 * stride :][:rows][1::2]
    into, found = torch.zeros(3000, dtype=torch.int32, device="cuda"), torch.zeros_like(tables, device="cuda")
    turn = torch.tensor([1], dtype=torch.int32, device="cuda")
    take_inputs(ring.cuda(), turn, last.cuda(), found, into, rows, stride, slots=2, places=3, values=5)
    assert torch.equal(found.cpu(), tables)
    expected = step[:3000].clone()
    slots = step[2 * stride :][:rows]
    expected[:rows] = torch.where(step[:rows] < 0, last[slots.long()], step[:rows])
    assert torch.equal(into.cpu(), expected)
