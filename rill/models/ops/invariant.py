"""Batch-invariant numerics: a token's result has the same bits whatever else is in the batch.

Matrix libraries choose their loop order by the shape of the whole product, so a row's sum may round differently in
a batch of 3 and in one of 40. Everything else in a decoder (norms, rotary embedding, attention, activation) is computed
row by row in fixed order by rill.models.ops.cpu_kernels and its Triton twin; what is left is the
products, and `invariant_linear` makes those fixed too:

    CPU   products that sum every element in one order (cpu_product.h); where the processor lacks what they need,
          rows are padded to one of a few sizes, and a size is used only if a one-time check on this machine has shown
          that it gives every row the same bits as the largest one
    CUDA  a Triton product with one tile shape and no split along the summed axis

The engine runs on these with batch_invariant=true. A trainer that wants the very same numbers scores with
rill.models.decode.packed_scorer.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from rill.errors import UnsupportedError
from rill.models.ops.cpu_kernels import DTYPES, load_cpu_kernels

ROW_SIZES = (16, 32, 64, 128, 256)
"""Rows of one product on the CPU. The last is always allowed: a product of one constant shape."""


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias with every row's bits independent of the others. x is [..., in]. Without gradients."""
    flat = x.reshape(-1, x.shape[-1])
    if x.device.type == "cuda":
        from rill.models.ops.triton_kernels import invariant_matmul

        out = invariant_matmul(flat, weight, bias)
    else:
        kernels = load_cpu_kernels()
        if kernels is not None and kernels.has_products and weight.dtype == x.dtype in DTYPES:
            out = kernels.linear(flat, weight, bias)
        else:
            out = _padded_product(flat, weight)
            if bias is not None:
                out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _padded_product(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    sizes = _row_sizes(weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads())
    if rows in sizes:
        return x @ weight.T
    out = x.new_empty(rows, weight.shape[0])
    largest = sizes[-1]
    for start in range(0, rows, largest):
        part = x[start : start + largest]
        size = next(s for s in sizes if s >= len(part))
        if len(part) < size:
            part = pad(part, (0, 0, 0, size - len(part)))
        out[start : start + largest] = (part @ weight.T)[: rows - start]
    return out


@functools.cache
def _row_sizes(num_out: int, num_in: int, dtype: torch.dtype, num_threads: int) -> tuple[int, ...]:
    """The sizes whose rows have the bits of the largest size, found by trying; loop orders do not depend on values."""
    generator = torch.Generator().manual_seed(num_out * 31 + num_in)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    largest = ROW_SIZES[-1]
    x = torch.randn(largest, num_in, generator=generator).to(dtype)
    full = x @ weight.T
    if not torch.equal(x.roll(7, 0) @ weight.T, full.roll(7, 0)):
        raise UnsupportedError(
            f"on this machine a {largest} x {num_in} by {num_in} x {num_out} {dtype} product rounds differently by "
            "row, so batch_invariant cannot be kept: use float32, or set batch_invariant=false"
        )
    return tuple(
        size
        for size in ROW_SIZES
        if all(torch.equal(x[at : at + size] @ weight.T, full[at : at + size]) for at in (0, largest - size))
    )
