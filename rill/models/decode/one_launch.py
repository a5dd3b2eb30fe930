"""Steps of very few rows on Hopper: all layers in one launch (rill/models/ops/cuda_layers.cu).

Such a step reads every weight once and computes next to nothing. Launched kernel by kernel, a third of it is spent
where one kernel ends and the next one begins; here the weights of what comes next are on their way all the time.

Called by rill.inference.native.cuda_runner for captured decode steps. The arithmetic is that of
rill.models.decode.decoder.KernelStages, up to the order in which products and attention are summed; `check` compares
the two on the device at hand.

Axes: B row, E hidden size, H query head, G key/value head, D head dimension, P piece of attention.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rill.errors import EngineError
from rill.models.decode.attention_paged import LayerCache, PagedBatch
from rill.models.decode.decode_work import DecodeWork, work_in_runs
from rill.models.decode.decoder import Decoder, add_norm
from rill.models.decode.structure import MLP, Layer
from rill.models.eager import TOLERANCES
from rill.models.ops.cuda_driver import CudaKernel

MAX_ROWS, CLUSTER, NUM_WARPS, NUM_THREADS, SLOT_BYTES = 8, 4, 8, 384, 3072
"""As in the source: rows, blocks that share their sums, warps of each that compute, threads, and
what a ring holds of a tile in one piece."""
MEMORY_BYTES = 227 << 10
"""Of a block: all that a multiprocessor has for it."""
MIN_SLOTS = 2
NUM_POINTERS = 13
"""Of a layer, in the source."""
FILES = ("cuda_device.h", "cuda_scores.h", "cuda_step.cu", "cuda_attend.cu", "cuda_layers.cu")
SOURCES = tuple(Path(__file__).parents[1] / "ops" / name for name in FILES)


class Step(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "layers", "hidden", "positions", "slots", "lengths", "table_rows", "tables", "qkv", "inner", "parts",
            "levels", "counters",
        )),
        *((name, ctypes.c_int) for name in ("num_layers", "rows", "table_stride")),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale")),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What the kernel is compiled for."""

    size: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    cache_block: int
    eps: float
    scale: float
    is_offset: bool
    is_gelu: bool
    head_eps: float | None
    """Of queries' and keys' own norms. None: they have none."""

    def macros(self, num_blocks: int) -> dict[str, int]:
        """And how many slots the rings of a block have, behind the rest of the source's Memory."""
        clusters = num_blocks // CLUSTER
        out_tiles = ((self.size // 8 + clusters - 1) // clusters + 1) // 2
        sums = max(out_tiles * NUM_WARPS * 512, NUM_WARPS * (2 * self.dim + 4) * 16)
        received = CLUSTER * max(out_tiles * 8, self.dim // 2 + 4) * 16
        attended = MAX_ROWS * 64 * -(-self.heads * self.dim // 32 // CLUSTER)
        rest = sums + received + attended + MAX_ROWS * NUM_WARPS * 4 + 8 + 4 * (6 * MAX_ROWS + 4)
        return {
            "SIZE": self.size, "INNER": self.inner, "HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim,
            "CACHE_BLOCK": self.cache_block, "BLOCKS": num_blocks, "MEMORY_BYTES": MEMORY_BYTES,
            "SLOTS": (MEMORY_BYTES - rest) // (SLOT_BYTES + 16) // NUM_WARPS,
            "IS_OFFSET": int(self.is_offset), "IS_GELU": int(self.is_gelu),
            "HAS_HEAD_NORMS": int(self.head_eps is not None),
        }  # fmt: skip


class OneLaunch:
    """For batches of one token a row, of which there are at most MAX_ROWS, that share nothing."""

    @staticmethod
    def of(decoder: Decoder, block_size: int, device: torch.device) -> OneLaunch | None:
        """None where the kernel computes something else than this model, or the device is another."""
        if torch.cuda.get_device_capability(device) != (9, 0):
            return None  # others share their memory out differently, and nobody tried
        kinds = {_shape_of(layer, block_size) for layer in decoder.layers}
        shape = next(iter(kinds))
        if len(kinds) > 1 or shape is None:
            return None
        num_blocks = num_blocks_of(device)
        if num_blocks == 0 or shape.macros(num_blocks)["SLOTS"] < MIN_SLOTS:
            return None
        return OneLaunch(decoder, shape, num_blocks, device)

    def __init__(self, decoder: Decoder, shape: LaunchShape, num_blocks: int, device: torch.device) -> None:
        self._decoder, self._shape, self._num_blocks = decoder, shape, num_blocks
        source = "".join(path.read_text() for path in SOURCES)
        self._kernel = CudaKernel(
            source, "layers", shape.macros(num_blocks), memory_bytes=MEMORY_BYTES, cluster=CLUSTER
        )
        self._pointers: list[int] = []
        self._table = torch.zeros(len(decoder.layers) * NUM_POINTERS, dtype=torch.int64, device=device)
        kv_heads, group = shape.kv_heads, shape.heads // shape.kv_heads
        num_pieces = MAX_ROWS * kv_heads + num_blocks
        like = torch.zeros(0, dtype=torch.bfloat16, device=device)
        self._scratch = (
            like.new_empty(MAX_ROWS, (shape.heads + 2 * kv_heads) * shape.dim),
            like.new_empty(MAX_ROWS, shape.inner),
            like.new_empty(num_pieces, group, shape.dim, dtype=torch.float32),
            like.new_empty(num_pieces, group, dtype=torch.float32),
            torch.zeros(2, dtype=torch.int32, device=device),
        )

    def __call__(
        self, ids_B: Tensor, positions_B: Tensor, batch: PagedBatch, cache: list[LayerCache]
    ) -> Tensor:
        """Last hidden states [B, E], after the final norm."""
        structure, shape = self._decoder.structure, self._shape
        hidden_BE = self._decoder.embedded(ids_B)
        self._note_pointers(cache)
        rows, tables = len(ids_B), batch.block_tables_BM
        assert rows <= MAX_ROWS and batch.table_rows_B is not None
        numbers = (positions_B, batch.slots_N, batch.context_lens_B, batch.table_rows_B, tables)
        assert all(n.dtype == torch.int32 for n in numbers)
        step = Step(
            *(tensor.data_ptr() for tensor in (self._table, hidden_BE, *numbers, *self._scratch)),
            len(self._decoder.layers), rows, tables.stride(0), shape.eps, shape.head_eps or 0.0, shape.scale,
        )  # fmt: skip
        self._kernel.launch(self._num_blocks, NUM_THREADS, step)
        return add_norm(self._decoder.ops, hidden_BE, None, structure.final_norm)

    def check(self, tables: Tensor, cache: list[LayerCache]) -> None:
        """Raise where it computes something else than the decoder, of a first token to each of a few rows. Before any
        block or table row is in use."""
        device, (num_blocks, block_size) = tables.device, cache[0].keys.shape[:2]
        count = min(MAX_ROWS, len(tables) - 1, num_blocks - 1)
        row_numbers = np.arange(count, dtype=np.int32)
        entries, pieces, runs = work_in_runs(np.ones_like(row_numbers), row_numbers, count)
        rows_B = torch.from_numpy(row_numbers).to(device)
        tables[:count, 0] = rows_B + 1
        batch = PagedBatch(
            slots_N=(rows_B + 1) * block_size,
            query_starts_B1=rows_B,
            context_lens_B=torch.ones_like(rows_B),
            block_tables_BM=tables,
            num_decodes=count,
            table_rows_B=rows_B,
            decode_work=DecodeWork(
                torch.from_numpy(entries).to(device), runs, torch.from_numpy(pieces).to(device)
            ),
        )
        ids_B, positions_B = rows_B + 1, torch.zeros_like(rows_B)
        found = self(ids_B, positions_B, batch, cache).float()
        wanted = self._decoder(ids_B, positions_B, batch, cache).float()
        tables[:count, 0] = 0
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= TOLERANCES[torch.bfloat16]:
            raise EngineError(f"a step in one launch is {error:.2g} off what the decoder gives")

    def _note_pointers(self, cache: list[LayerCache]) -> None:
        """Where the layers' parts lie: read by the kernel, and by graphs that have captured it."""
        pointers = [
            0 if tensor is None else tensor.data_ptr()
            for layer, held in zip(self._decoder.layers, cache, strict=True)
            for tensor in (*_parts_of(layer), *held)
        ]
        if pointers != self._pointers:  # never while a graph is captured: it was run once before
            self._table.copy_(torch.tensor(pointers, dtype=torch.int64))
            self._pointers = pointers


@cache
def num_blocks_of(device: torch.device) -> int:
    """That run at one time, in whole clusters."""
    source = SOURCES[0].read_text() + f"CLUSTER_KERNEL({CLUSTER}, {NUM_THREADS}) nothing() {{}}"
    with torch.cuda.device(device):
        nothing = CudaKernel(source, "nothing", {}, memory_bytes=MEMORY_BYTES, cluster=CLUSTER)
        return CLUSTER * nothing.max_clusters(NUM_THREADS)


def _parts_of(layer: Layer) -> tuple[Tensor | None, ...]:
    """In the order of the source's Layer, which the cache ends."""
    assert isinstance(layer.mlp, MLP) and layer.before_attention is not None and layer.before_mlp is not None
    norms = (None, None) if layer.head_norms is None else (layer.head_norms.query, layer.head_norms.key)
    return (
        layer.qkv.weight,
        layer.qkv.bias,
        layer.out.weight,
        layer.mlp.gate_up.weight,
        layer.mlp.down.weight,
        layer.before_attention.weight,
        layer.before_mlp.weight,
        *(None if norm is None else norm.weight for norm in norms),
        *layer.rope,
    )


def _shape_of(layer: Layer, block_size: int) -> LaunchShape | None:
    """None: not what the kernel computes."""
    call, before = layer.call, layer.before_attention
    if not isinstance(layer.mlp, MLP) or before is None or layer.before_mlp is None:
        return None
    rule, projections = call.rule, layer.projections
    shape = LaunchShape(
        size=len(before.weight),
        inner=0 if layer.mlp.down.weight is None else layer.mlp.down.weight.shape[1],
        heads=call.num_heads,
        kv_heads=call.num_kv_heads,
        dim=call.key_dim,
        cache_block=block_size,
        eps=before.eps,
        scale=rule.scale,
        is_offset=before.is_offset,
        is_gelu=layer.mlp.is_gelu,
        head_eps=None if layer.head_norms is None else layer.head_norms.query.eps,
    )
    is_plain = (
        layer.after_attention is None
        and layer.after_mlp is None
        and layer.residual_scale == 1.0
        and layer.turns_in_kernel
        and not before.is_centered
        and (before.is_offset, before.is_centered, before.eps)
        == (layer.before_mlp.is_offset, layer.before_mlp.is_centered, layer.before_mlp.eps)
        and (rule.window, rule.softcap, rule.sinks_H) == (0, 0.0, None)
        and all(p.weight is not None and p.weight.dtype == torch.bfloat16 for p in projections)
        and all(p.scales is None and (p.bias is None or p is layer.qkv) for p in projections)
    )
    divides = (
        all(width % 64 == 0 for width in (shape.size, shape.inner, shape.heads * shape.dim))
        and shape.dim in (64, 128)
        and shape.heads // shape.kv_heads <= 8
        and block_size % 16 == 0
    )
    return shape if is_plain and divides else None
