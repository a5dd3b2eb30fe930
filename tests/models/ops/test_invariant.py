"""Batch-invariant products: a row has the same bits whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from rill.models.ops.invariant import invariant_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        for num_out, num_in in ((96, 32), (300, 128), (64, 512)):
            weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
            x = torch.randn(600, num_in, generator=generator).to(dtype)
            whole = invariant_linear(x, weight)
            for start, end in ((0, 1), (7, 24), (100, 356), (599, 600), (3, 500)):
                assert torch.equal(invariant_linear(x[start:end], weight), whole[start:end])
            expected = (x.float() @ weight.float().T).to(dtype)
            torch.testing.assert_close(
                whole, expected, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-4
            )
    finally:
        torch.set_num_threads(before)
