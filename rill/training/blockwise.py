"""8-bit codes for optimizer state, block by block: each run of 256 values has one float32 scale, its largest magnitude.

Caller: rill.training.adamw8bit. rill.training.adamw_triton does the same in its kernel.

Codes are dense near the scale and reach far below it ("dynamic" quantisation, Dettmers et al., 2110.02861). A code
c > 0 with leading bit e means decade top = 10^(e − E), cut into 2^e equal cells, and cell c − 2^e of it:

    E = 7 unsigned, 6 signed   (0.1·top, top] ∋ |x| / scale        value = top · (0.1 + 0.9 · (c − 2^e + 0.5) / 2^e)

The highest code stands for the scale itself and 0 for exact zero alone, so a small second moment never becomes a
division by nothing. encode(decode(codes)) gives the same codes and scales: a checkpoint can hold plain float32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
SIGNED_TOP = 6
UNSIGNED_TOP = 7
"""Highest leading bit of a code."""


def num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def encode(values: Tensor, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """(uint8 codes in the shape of `values`, float32 [blocks] scales)."""
    flat = values.detach().float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    share = blocks.abs() / torch.where(scales > 0, scales, 1.0)[:, None]
    top = SIGNED_TOP if is_signed else UNSIGNED_TOP
    bounds = torch.tensor([10.0**-k for k in range(top, 0, -1)], device=values.device)
    bit = torch.bucketize(share, bounds)
    cells = torch.exp2(bit.float())
    cell = ((share * 10.0 ** (top - bit) - 0.1) / 0.9 * cells).floor().clamp_min(0).minimum(cells - 1)
    codes = torch.where(share > 0, cells + cell, 0.0).to(torch.uint8)
    if is_signed:
        codes = torch.where(blocks < 0, codes + 128, codes)
    return codes.flatten()[: len(flat)].view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """float32 values in the shape of `codes`."""
    values = _value_table(codes.device, is_signed=is_signed)[codes.flatten().long()]
    return (values * scales.repeat_interleave(BLOCK)[: len(values)]).view(codes.shape)


@functools.cache
def _value_table(device: torch.device, *, is_signed: bool) -> Tensor:
    """float32 [256]: what each code stands for, as a share of the scale."""
    top = SIGNED_TOP if is_signed else UNSIGNED_TOP
    values = [0.0]
    for bit in range(top + 1):
        cells = 2**bit
        values += [10.0 ** (bit - top) * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
    values[-1] = 1.0
    if is_signed:
        values += [-value for value in values]
    return torch.tensor(values, dtype=torch.float32, device=device)
