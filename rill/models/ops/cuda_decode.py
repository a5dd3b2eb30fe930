"""Decode attention on Hopper (cuda_decode.cu), of pieces that rill.models.decode.decode_work lists.

The cache is read by the copy engine, 16 tokens of two key/value heads at a time. Where this can, it takes the place of
the kernel in Triton (rill.models.ops.triton_decode), which calls it.

Axes: B row, H query head, K key/value head, D head dimension.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rill.errors import EngineError
from rill.models.decode.attention_paged import LayerCache
from rill.models.decode.decode_work import MAX_PIECES, WORDS, DecodeWork, Run, work_in_runs
from rill.models.eager import TOLERANCES, ScoreRule
from rill.models.ops.cuda_driver import CudaKernel, tensor_map

STAGES, PER_SM = 4, 2
"""Of two heads; blocks to a multiprocessor. Found by trying, on an H200."""
NUM_THREADS, TOKENS, HALF = 160, 16, 64
"""As in the source: threads, tokens of a stage, and dimensions of a tile."""
MAX_GROUP = 8
FILES = ("cuda_device.h", "cuda_tiles.h", "cuda_scores.h", "cuda_decode.cu")
SOURCES = tuple(Path(__file__).with_name(name) for name in FILES)


class Decode(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        ("keys_and_values", ctypes.c_ubyte * 256),
        *((name, ctypes.c_void_p) for name in ("queries", "tables", "entries", "out", "parts", "stats")),
        *((name, ctypes.c_int) for name in ("query_stride", "table_stride", "num_new")),
        ("scale", ctypes.c_float),
    ]


def attends(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device) -> bool:
    """Whether decode() does, where it covers() what is to be computed."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return num_heads // num_kv_heads <= MAX_GROUP and head_dim in (64, 128) and block_size % TOKENS == 0


def covers(query_BW: Tensor, held: LayerCache, rule: ScoreRule) -> bool:
    """Whether these are what decode() computes."""
    is_plain = rule.window == 0 and rule.softcap == 0.0 and rule.sinks_H is None
    is_read = all(x.dtype is torch.bfloat16 and x.is_contiguous() for x in held)
    return is_plain and is_read and query_BW.dtype is torch.bfloat16


def decode(
    query_BW: Tensor, held: LayerCache, tables: Tensor, work: DecodeWork, run: Run, num_heads: int,
    out: Tensor, parts: Tensor, stats: Tensor, scale: float,
) -> None:  # fmt: skip
    """The pieces of a run of the list: into `out` [B, H, D] those that are a row's only one, into parts the others."""
    num_new = -1 if work.num_new is None else work.num_new
    num_blocks, block_size, num_kv_heads, dim = held.keys.shape
    macros = macros_of(num_heads, num_kv_heads, dim, block_size)
    maps = b"".join(_map_of(x, num_blocks * block_size, num_kv_heads, dim) for x in held)
    argument = Decode(
        (ctypes.c_ubyte * 256).from_buffer_copy(maps), query_BW.data_ptr(), tables.data_ptr(),
        work.entries.data_ptr() + run.first_entry * WORDS * 4, out.data_ptr(),
        parts.data_ptr() - run.first_row * num_heads * MAX_PIECES * dim * 4,  # they are those of the run's rows
        stats.data_ptr() - run.first_row * num_heads * MAX_PIECES * 2 * 4,
        query_BW.stride(0), tables.stride(0), num_new, scale,
    )  # fmt: skip
    grid = (run.num_entries, num_kv_heads // _pair(num_kv_heads), 1)
    _kernel(tuple(macros.items())).launch_early(grid, NUM_THREADS, argument)


def check(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device) -> None:
    """Raise where it computes something else than torch, or the source does not compile."""
    lengths, bf16 = [1, block_size + 3, 300], torch.bfloat16
    per_row = -(-max(lengths) // block_size)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(bf16)

    shape = (len(lengths) * per_row, block_size, num_kv_heads, head_dim)
    held, query = LayerCache(drawn(*shape), drawn(*shape)), drawn(len(lengths), num_heads * head_dim)
    tables = torch.arange(shape[0], dtype=torch.int32, device=device).view(len(lengths), per_row)
    lens, rows = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
    entries, _, runs = work_in_runs(lens, rows, len(lengths))
    out = torch.empty(len(lengths), num_heads, head_dim, dtype=bf16, device=device)
    room = torch.empty(len(lengths) * num_heads * MAX_PIECES * head_dim, device=device)
    work = DecodeWork(torch.from_numpy(entries).to(device), runs, None)
    decode(query, held, tables, work, runs[0], num_heads, out, room, room, head_dim**-0.5)
    for row, length in enumerate(lengths):
        keys, values = (x.view(len(lengths), -1, num_kv_heads, head_dim)[row, :length].float() for x in held)
        queries = query[row].view(num_kv_heads, -1, head_dim).float()
        shares = (torch.einsum("kgd,tkd->kgt", queries, keys) * head_dim**-0.5).softmax(-1)
        wanted = torch.einsum("kgt,tkd->kgd", shares, values).flatten(0, 1)
        error = float((out[row].float() - wanted).norm() / wanted.norm())
        if not error <= TOLERANCES[bf16]:
            raise EngineError(f"attention of {length} tokens is {error:.2g} off torch's")


def macros_of(num_heads: int, num_kv_heads: int, dim: int, block_size: int) -> dict[str, int]:
    return {
        "HEADS": num_heads, "KV_HEADS": num_kv_heads, "DIM": dim, "CACHE_BLOCK": block_size, "MAX_PIECES": MAX_PIECES,
        "STAGES": STAGES * (2 // _pair(num_kv_heads)), "PER_SM": PER_SM,
    }  # fmt: skip


def memory_bytes_of(macros: dict[str, int]) -> int:
    """Stages begin at a multiple of 1024; each has two barriers."""
    stage = 2 * _pair(macros["KV_HEADS"]) * TOKENS * macros["DIM"] * 2
    return 1024 + macros["STAGES"] * (stage + 16)


def _pair(num_kv_heads: int) -> int:
    """Heads that are read together."""
    return 2 - num_kv_heads % 2


def _map_of(x: Tensor, num_tokens: int, num_kv_heads: int, dim: int) -> bytes:
    halves = num_kv_heads * dim // HALF
    box = (HALF, TOKENS, _pair(num_kv_heads) * dim // HALF)
    return tensor_map(x, (HALF, num_tokens, halves), (num_kv_heads * dim, HALF), box)


@cache
def _kernel(macros: tuple[tuple[str, int], ...]) -> CudaKernel:
    source = "".join(path.read_text() for path in SOURCES)
    return CudaKernel(source, "decode", dict(macros), memory_bytes=memory_bytes_of(dict(macros)), cluster=1)
