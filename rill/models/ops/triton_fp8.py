"""Rows of numbers in 8 bits (e4m3) with a scale each: written by the kernels that make them, or by one of their own.

A row's scale is its largest magnitude over 448, the largest that the format holds.

Called by rill.models.decode.quantized. Axes: B row, K input, N output, P part of the summed axis.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rill.models.ops.fp8 import Fp8Rows
from rill.models.ops.triton_language import await_inputs, early_launch, power_of_2, tl, triton


@triton.jit
def store_fp8(x, out_ptr, scale_ptr, row, size, at, mask):  # type: ignore[no-untyped-def]
    """One row of float32, whole in this program; what is masked is 0."""
    store_scaled(x, tl.max(tl.abs(x), axis=0), out_ptr, scale_ptr, row, size, at, mask)


@triton.jit
def store_scaled(x, largest, out_ptr, scale_ptr, row, size, at, mask):  # type: ignore[no-untyped-def]
    """A part of a row, or all of it, with the row's largest magnitude."""
    largest = tl.maximum(largest, 1e-12)
    tl.store(scale_ptr + row, largest / 448.0)
    tl.store(out_ptr + row * size + at, (x * (448.0 / largest)).to(tl.float8e4nv), mask=mask)


@triton.jit
def scaled(x, scale, bias_ptr, at, mask, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a product of rows of 8 bits lacks: the scales of its row and weight, and the bias of its columns `at`."""
    y = x.to(tl.float32) * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return y.to(x.dtype)


@triton.jit
def widened_pairs(x):  # type: ignore[no-untyped-def]
    """Two numbers of e4m3 in each of 16 bits: the first ones and the second ones, as float16, exactly. There is an
    instruction for it; to bfloat16 the way leads through float32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 a, b;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        prmt.b32 $0, a, b, 0x5410;
        prmt.b32 $1, a, b, 0x7632;
        }""",
        "=r,=r,r",
        [x],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def cached(x, cache_ptr):  # type: ignore[no-untyped-def]
    """As the cache holds it: in 8 bits without a scale, what is larger than they hold at their largest."""
    kind: tl.constexpr = cache_ptr.dtype.element_ty
    if kind == tl.float8e4nv:
        return tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0).to(kind)
    return x.to(kind)


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    x_ptr,
    largest_ptr,
    out_ptr,
    scale_ptr,
    size,
    HAS_LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_LARGEST:
        store_scaled(x, tl.load(largest_ptr).to(tl.float32), out_ptr, scale_ptr, row, size, at, mask)
    else:
        store_fp8(x, out_ptr, scale_ptr, row, size, at, mask)


@triton.jit(do_not_specialize=["rows"])
def _part_of_product(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, out_ptr, rows, size, num_in, part_in, TILE_B: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    part = tl.program_id(2).to(tl.int64)
    first = part * part_in
    x_at = x_ptr + tl.minimum(b, rows - 1)[:, None] * num_in + k[None, :]
    w_at = w_ptr + tl.minimum(n, size - 1)[:, None] * num_in + k[None, :]
    await_inputs(PDL)
    sums = tl.zeros([TILE_B, TILE_N], tl.float32)
    for at in range(first, tl.minimum(first + part_in, num_in), TILE_K):
        sums = tl.dot(tl.load(x_at + at), tl.trans(tl.load(w_at + at)), sums)
    to = out_ptr + (part * rows + b[:, None]) * size + n[None, :]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=(b < rows)[:, None] & (n < size)[None, :])


TILE_K, MIN_PART = 128, 1024
"""Inputs that a program multiplies at one time, and the fewest that are worth a part of their own."""


def product_in_parts(x: Fp8Rows, weight_NK: Tensor) -> Tensor | None:
    """As x.product(), but [P, B, N], for whoever reads it to add up. None where one part fills the device: the library
    has none that is cut along the summed axis, and takes as long for 128 rows as for 256."""
    (rows, num_in), size = x.values_BK.shape, len(weight_NK)
    tile_n = 64 if rows <= 128 else 128
    tiles = -(-rows // 128), -(-size // tile_n)
    num_parts = min(_num_multiprocessors(weight_NK.device) // (tiles[0] * tiles[1]), num_in // MIN_PART)
    if num_parts < 2 or num_in % TILE_K:
        return None
    part_in = -(-num_in // TILE_K // num_parts) * TILE_K
    num_parts = -(-num_in // part_in)
    parts = torch.empty(num_parts, rows, size, dtype=torch.bfloat16, device=weight_NK.device)
    _part_of_product[(*tiles, num_parts)](
        x.values_BK, weight_NK, parts, rows, size, num_in, part_in, TILE_B=128, TILE_N=tile_n, TILE_K=TILE_K,
        num_warps=4, num_stages=6 if rows <= 128 else 5, **early_launch(weight_NK.device),
    )  # fmt: skip
    return parts


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def as_read(keys: Tensor, values: Tensor, query: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys and values as a kernel is given them, and how it reads them: 0: as they are, 1: 8 bits through float32,
    2: by widened_pairs. Heads of fewer than 32 numbers would have halves too narrow for a product."""
    if keys.dtype is not torch.float8_e4m3fn:
        return keys, values, 0
    if query.dtype.itemsize != 2 or keys.device.type != "cuda" or keys.shape[-1] < 32:
        return keys, values, 1
    return keys.view(torch.int16), values.view(torch.int16), 2


def quantize_into(x: Tensor, values: Tensor, scales: Tensor, largest: Tensor | None = None) -> None:
    """x [B, K] into e4m3 values [B, K] and float32 scales [B], all contiguous. `largest`: magnitude of all rows
    together, which have one scale then."""
    rows, size = x.shape
    block = power_of_2(size)
    _quantize[(rows,)](
        x, largest, values, scales, size, HAS_LARGEST=largest is not None, BLOCK=block,
        num_warps=4 if block <= 2048 else 8, **early_launch(x.device),
    )  # fmt: skip
