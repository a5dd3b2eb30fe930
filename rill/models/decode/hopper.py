"""Products of up to a few hundred rows on Hopper (rill/models/ops/cuda_product.cu).

A decode step of so many rows is bound by its weights or nearly so, and the library's products neither ask for them
while the kernel before still runs nor join the activation. Each weight is cut so that all multiprocessors read it at
one time:

    gate_up     tiles of gates and of the ups that belong to them, one for each multiprocessor; with more than 256 rows
                a multiprocessor has some of the rows and several tiles
    the others  tiles of TILE rows, and parts [P, B, N] of the summed axis, added up by the kernel that reads them next

Weights may be read before the kernel before has ended, because no kernel of a captured step writes them, and a step
begins when all that was launched before it has ended. For the rows, a kernel waits.

Called by rill.models.decode.skinny. Axes: B row, N output, K input, P part of the summed axis.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rill.models.ops.cuda_driver import CudaKernel, tensor_map

MAX_ROWS, MAX_GATED_ROWS = 256, 512
"""With more, the library's products are the faster ones. These, and what follows: found by trying, on an H200."""
TILE = 64
"""Rows of a weight that is cut into parts."""
MIN_STEPS = 12
"""Of a part."""
SHORT_STEPS, SHORT_GROUPS = 48, 2
"""A weight of fewer steps is read by twice the blocks, of so many groups of rows each, where a block may have more."""
MAX_GROUPS, MAX_TILE, MAX_TILE_OF_MANY = 4, 256, 136
"""What a block's registers hold the sums of: so many groups of rows; tiles so wide, or with three groups and more no
wider than the last."""
GROUP, STEP = 64, 64
"""As in the source: rows, and inputs at a time."""
MEMORY_BYTES = 227 << 10
"""Of a block: all that a multiprocessor has for it."""
FILES = ("cuda_device.h", "cuda_tiles.h", "cuda_product.cu")
SOURCES = tuple(Path(__file__).parents[1] / "ops" / name for name in FILES)


class Product(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        ("x_and_weight", ctypes.c_ubyte * 256),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "num_out", "num_tiles", "num_steps", "x_rows")),
        ("padding", ctypes.c_char * 36),
    ]


class ProductCut(NamedTuple):
    """How a product is shared out among the multiprocessors."""

    num_groups: int
    """Of 64 rows, to a block."""
    tile: int
    num_parts: int
    num_stages: int
    is_gated: bool

    @property
    def memory_bytes(self) -> int:
        """Stages begin at a multiple of 1024; each has two barriers."""
        return 1024 + self.out_bytes + self.num_stages * self.stage_bytes

    @property
    def out_bytes(self) -> int:
        return 4 * 8 * self.num_groups * self.tile if self.is_gated else 0

    @property
    def stage_bytes(self) -> int:
        return (GROUP * self.num_groups + self.tile) * 2 * STEP + 16


def cut_of(rows: int, num_out: int, num_in: int, num_sms: int, *, is_gated: bool) -> ProductCut:
    num_groups, num_steps, num_parts = -(-rows // GROUP), num_in // STEP, 1
    num_groups = -(-num_groups // -(-num_groups // MAX_GROUPS))
    if is_gated:
        widest = MAX_TILE if num_groups <= 2 else MAX_TILE_OF_MANY
        num_tiles = num_sms * -(-num_out // (num_sms * widest))
        tile = 8 * -(-num_out // (8 * num_tiles))
    else:
        tile = TILE
        if num_steps < SHORT_STEPS:
            num_groups = min(num_groups, SHORT_GROUPS)
        num_tiles = -(-num_out // tile) * -(-rows // (GROUP * num_groups))
        num_parts = max(1, min(num_sms // num_tiles, num_steps // MIN_STEPS))
    cut = ProductCut(num_groups, tile, num_parts, 0, is_gated)
    room = (MEMORY_BYTES - cut.memory_bytes) // cut.stage_bytes
    return cut._replace(num_stages=min(room, max(2, -(-num_steps // num_parts))))


def multiplies(weight_NK: Tensor) -> bool:
    """Whether product() does: in whole steps, from where the copy engine can begin. Outputs are written by pairs, gated
    ones by fours, which the widths of a model are multiples of whose every weight passes here."""
    return (
        weight_NK.dtype is torch.bfloat16
        and weight_NK.shape[1] % STEP == 0
        and weight_NK.is_contiguous()
        and weight_NK.data_ptr() % 16 == 0
    )


def product(x_BK: Tensor, weight_NK: Tensor, *, is_gelu: bool | None = None) -> Tensor:
    """float32 parts [P, B, N] whose sum is x @ weight.T. `is_gelu`: the weight's rows are gates and then ups, and the
    one part is act(x @ gate.T) · (x @ up.T) in x's type. The weight is nothing that the kernel before wrote."""
    (rows, num_in), num_out, is_gated = x_BK.shape, len(weight_NK), is_gelu is not None
    assert multiplies(weight_NK) and num_out % (8 if is_gated else 2) == 0
    num_sms = torch.cuda.get_device_properties(x_BK.device).multi_processor_count
    cut = cut_of(rows, num_out, num_in, num_sms, is_gated=is_gated)
    height = GROUP * cut.num_groups
    num_tiles, num_blocks = -(-num_out // cut.tile), -(-rows // height)
    num_turns = -(-num_tiles // max(1, num_sms // num_blocks)) if is_gated else 1
    grid = (-(-num_tiles // num_turns), cut.num_parts, num_blocks)
    x_rows = min(height, rows)
    x_map = tensor_map(x_BK, (num_in, rows), (x_BK.stride(0),), (STEP, x_rows))
    if is_gated:
        num_out //= 2
        sizes, box = (num_in, 2, num_out), (STEP, 2, cut.tile // 2)
        weight_map = tensor_map(weight_NK, sizes, (num_out * num_in, num_in), box)
        out = x_BK.new_empty(1, rows, num_out)
    else:
        weight_map = tensor_map(weight_NK, (num_in, num_out), (num_in,), (STEP, cut.tile))
        out = x_BK.new_empty(cut.num_parts, rows, num_out, dtype=torch.float32)
    maps = (ctypes.c_ubyte * 256).from_buffer_copy(x_map + weight_map)
    argument = Product(maps, out.data_ptr(), rows, num_out, num_tiles, num_in // STEP, x_rows)
    kernel = _kernel(cut, is_gelu is True)
    kernel.launch_early(grid, 128 * cut.num_groups + 32, argument)
    return out


@cache
def _kernel(cut: ProductCut, is_gelu: bool) -> CudaKernel:
    device, tiles, kernel = (path.read_text() for path in SOURCES)
    source = "".join((device, tiles, multiply_tiles(cut.tile), kernel))
    return CudaKernel(source, "product", macros_of(cut, is_gelu), memory_bytes=cut.memory_bytes, cluster=1)


def macros_of(cut: ProductCut, is_gelu: bool) -> dict[str, int]:
    return {
        "GROUPS": cut.num_groups, "TILE": cut.tile, "STAGES": cut.num_stages, "IS_GATED": int(cut.is_gated),
        "IS_GELU": int(is_gelu),
    }  # fmt: skip


def multiply_tiles(tile: int) -> str:
    """The source of one instruction of the tensor cores, whose width is part of its name."""
    num = tile // 2
    names, operands = (
        ", ".join(f"%{i}" for i in range(num)),
        ", ".join(f'"+f"(sums[{i}])' for i in range(num)),
    )
    return (
        f"DEVICE void multiply_tiles(float (&sums)[{num}], tile_address a, tile_address b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.bf16.bf16 "\n'
        f'    "{{{names}}}, %{num}, %{num + 1}, 1, 1, 1, 0, 0;"\n'
        f'    : {operands} : "l"(a), "l"(b));\n}}\n'
    )
