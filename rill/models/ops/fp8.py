"""Numbers in 8 bits, e4m3: four bits of exponent, three of mantissa, 448 at most; rows of them with a scale each.

    x ≈ values · scale,  scale = max |x| / 448 over the row, or over a whole weight

A product of such rows is computed by the tensor cores from Hopper on (`product`), and the scales are applied by the
kernel that reads it: Σ (v·s)(w·t) = s·t·Σ v·w. Elsewhere numbers are rounded to what
8 bits hold and multiplied in the model's own precision (`rounded`): the same numbers, at no gain.

Called by rill.models.decode.quantized. Axes: B row, K input, N output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_ROW = 1e-12
"""A row of nothing but zeros has the scale of this."""


class Fp8Rows(NamedTuple):
    values_BK: Tensor
    scales_B: Tensor  # float32

    @classmethod
    def empty(cls, size: Sequence[int], device: torch.device) -> Fp8Rows:
        scales = torch.empty(size[0], dtype=torch.float32, device=device)
        return cls(torch.empty(tuple(size), dtype=FP8, device=device), scales)

    @classmethod
    def of(cls, x_BK: Tensor, *, is_weight: bool = False) -> Fp8Rows:
        rows = cls.empty(x_BK.shape, x_BK.device)
        rows.write(x_BK, is_weight=is_weight)
        return rows

    def write(self, x_BK: Tensor, *, is_weight: bool = False) -> None:
        """`is_weight`: all rows have the scale of the largest."""
        if x_BK.device.type == "cuda":
            from rill.models.ops.triton_fp8 import quantize_into

            largest = torch.linalg.vector_norm(x_BK, ord=torch.inf) if is_weight else None
            quantize_into(x_BK.contiguous(), self.values_BK, self.scales_B, largest)
            return
        largest = x_BK.float().abs().amax(-1).clamp(min=LEAST_ROW)
        largest = largest.amax().expand_as(largest) if is_weight else largest
        self.scales_B.copy_(largest / LARGEST)
        self.values_BK.copy_((x_BK.float() * (LARGEST / largest)[:, None]).clamp(-LARGEST, LARGEST))

    def wide(self, dtype: torch.dtype) -> Tensor:
        return (self.values_BK.float() * self.scales_B[:, None]).to(dtype)

    def product(self, weight_NK: Tensor) -> Tensor:
        """Values @ weight.T in bfloat16 by the tensor cores, without the scales: whoever reads it applies them. The
        library's products that apply a scale for each row are the slower ones by 30 to 120 % at 256 rows."""
        one = _one(self.values_BK.device)
        return torch._scaled_mm(
            self.values_BK,
            weight_NK.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def product_in_parts(self, weight_NK: Tensor) -> Tensor | None:
        """As product(), but [P, B, N], to be added up by whoever reads it; None where one part fills the device."""
        from rill.models.ops.triton_fp8 import product_in_parts

        return product_in_parts(self, weight_NK)


Activations = Tensor | Fp8Rows
"""What flows from a norm or an activation to a product."""


def values_and_scales(x: Activations) -> tuple[Tensor, Tensor | None]:
    return (x, None) if isinstance(x, Tensor) else x


class ProductScales(NamedTuple):
    """What is left to do to a product of rows of 8 bits: y · x_B · weight_N + bias_N; weight_N is the same number
    throughout a parameter's rows."""

    x_B: Tensor | None
    weight_N: Tensor | None
    bias_N: Tensor | None

    def applied(self, y_BN: Tensor) -> Tensor:
        assert self.x_B is not None and self.weight_N is not None
        whole = y_BN.float() * self.x_B[:, None] * self.weight_N
        return (whole if self.bias_N is None else whole + self.bias_N).to(y_BN.dtype)


NO_SCALES = ProductScales(None, None, None)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device's products read 8 bits: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def rounded(x_BK: Tensor, *, is_weight: bool = False) -> Tensor:
    """As 8 bits and their scale hold it."""
    return Fp8Rows.of(x_BK, is_weight=is_weight).wide(x_BK.dtype)


def rounded_plain(x: Tensor) -> Tensor:
    """As 8 bits hold it without a scale."""
    return x.float().clamp(-LARGEST, LARGEST).to(FP8).to(x.dtype)
