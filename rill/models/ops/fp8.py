"""Numbers in 8 bits, e4m3: four bits of exponent, three of mantissa, 448 at most; rows of them with a scale each.

    x ≈ values · scale,  scale = max |x| / 448 over the row

A product of such rows is computed by the tensor cores from Hopper on (`product`). Elsewhere numbers are rounded to what
8 bits hold and multiplied in the model's own precision (`rounded`): the same numbers, at no gain.

Called by rill.models.decode.quantized. Axes: B row, K input, N output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_ROW = 1e-12
"""A row of nothing but zeros has the scale of this."""


class Fp8Rows(NamedTuple):
    values_BK: torch.Tensor
    scales_B: torch.Tensor  # float32

    @classmethod
    def empty(cls, size: Sequence[int], device: torch.device) -> Fp8Rows:
        scales = torch.empty(size[0], dtype=torch.float32, device=device)
        return cls(torch.empty(tuple(size), dtype=FP8, device=device), scales)

    @classmethod
    def of(cls, x_BK: torch.Tensor) -> Fp8Rows:
        rows = cls.empty(x_BK.shape, x_BK.device)
        rows.write(x_BK)
        return rows

    def write(self, x_BK: torch.Tensor) -> None:
        if x_BK.device.type == "cuda":
            from rill.models.ops.triton_fp8 import quantize_into

            quantize_into(x_BK.contiguous(), self.values_BK, self.scales_B)
            return
        largest = x_BK.float().abs().amax(-1).clamp(min=LEAST_ROW)
        self.scales_B.copy_(largest / LARGEST)
        self.values_BK.copy_((x_BK.float() * (LARGEST / largest)[:, None]).clamp(-LARGEST, LARGEST))

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values_BK.float() * self.scales_B[:, None]).to(dtype)

    def product(self, weight_NK: Fp8Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """These rows @ weight.T + bias in bfloat16, by the tensor cores."""
        return torch._scaled_mm(
            self.values_BK, weight_NK.values_BK.t(), scale_a=self.scales_B[:, None],
            scale_b=weight_NK.scales_B[None], bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device's products read 8 bits: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def rounded(x_BK: torch.Tensor) -> torch.Tensor:
    """Each row as 8 bits and its scale hold it."""
    return Fp8Rows.of(x_BK).wide(x_BK.dtype)


def rounded_plain(x: torch.Tensor) -> torch.Tensor:
    """As 8 bits hold it without a scale."""
    return x.float().clamp(-LARGEST, LARGEST).to(FP8).to(x.dtype)
