"""Typed calls into cpu_kernels.cpp: products, attention, norms, rotary embedding and activation on the CPU.

Where there is no compiler `load_cpu_kernels` returns None and callers use torch. Rows are bit-identical whatever the
batch and the number of threads; rill.models.ops.invariant relies on it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import CFUNCTYPE, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from rill.models.decode.attention_paged import CacheRows, LayerCache, PagedBatch
from rill.models.decode.structure import HeadNorms, Norm
from rill.models.eager import ScoreRule
from rill.models.ops.cpu_build import load_library
from rill.models.ops.torch_kernels import TorchKernels

_SIGNATURES: dict[str, list[Any]] = {
    "add_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float, c_int, c_int],
    "act_mul": [c_void_p] * 2 + [c_int64] * 2 + [c_int, c_int],
    "rope_store": [c_void_p] * 7 + [c_float] + [c_void_p] * 2 + [c_int64] * 4 + [c_int],
    "attend": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    + [c_int64] * 5
    + [c_float, c_int64, c_float, c_void_p, c_void_p, c_int],
    "linear": [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int],
}
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """The kernels, built if need be; None where they cannot be."""
    library = load_library()
    return None if library is None else CpuKernels(library)


class CpuKernels(TorchKernels):
    """Typed calls into the library. Tensors are contiguous unless a stride is passed; dtype float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        find = library["kernel"]
        find.argtypes, find.restype = [c_char_p, c_int], c_void_p
        self._calls: dict[tuple[str, torch.dtype], Any] = {}
        for dtype in DTYPES:
            for name, arguments in _SIGNATURES.items():
                address = find(name.encode(), dtype is torch.bfloat16)
                if address is not None:
                    self._calls[name, dtype] = CFUNCTYPE(None, *arguments)(address)
        self.has_products = ("linear", torch.float32) in self._calls
        """Whether linear() is here: it needs AVX-512."""
        self.num_threads = torch.get_num_threads()

    @staticmethod
    def supports(dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in DTYPES and head_dim <= 256

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias for x [N, in], with sums in float32; torch's where has_products is false.

        Weights are read where they lie: nothing is packed or copied, so new values in place need no further word.
        """
        if not self.has_products:
            return super().linear(x, weight, bias)
        x, weight = x.contiguous(), weight.contiguous()
        rows, k = x.shape
        out = x.new_empty(rows, weight.shape[0])
        self._calls["linear", x.dtype](
            x.data_ptr(), rows, k, weight.data_ptr(), _pointer(bias), weight.shape[0], out.data_ptr(), self.num_threads
        )  # fmt: skip
        return out

    def add_norm(self, hidden: Tensor, addend: Tensor | None, norm: Norm) -> Tensor:
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        self._calls["add_norm", hidden.dtype](
            hidden.data_ptr(), _pointer(addend), norm.weight.data_ptr(), out.data_ptr(), rows, size, norm.eps,
            norm.is_offset, self.num_threads,
        )  # fmt: skip
        return out

    def act_mul(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._calls["act_mul", gate_up.dtype](
            gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gelu, self.num_threads
        )
        return out

    def rope_store(self, qkv: Tensor, rows: CacheRows, num_heads: int, norms: HeadNorms | None) -> None:
        kv_heads, dim = rows.keys.shape[2:]
        q_norm, k_norm = (None, None) if norms is None else (norms.query.weight, norms.key.weight)
        eps = 0.0 if norms is None else norms.query.eps
        self._calls["rope_store", qkv.dtype](
            qkv.data_ptr(), rows.cos.data_ptr(), rows.sin.data_ptr(), rows.positions_N.data_ptr(),
            rows.slots_N.data_ptr(), _pointer(q_norm), _pointer(k_norm), eps, rows.keys.data_ptr(),
            rows.values.data_ptr(), qkv.shape[0], num_heads, kv_heads, dim, self.num_threads,
        )  # fmt: skip

    def attend(
        self, query_NW: Tensor, num_heads: int, cache: LayerCache, batch: PagedBatch, rule: ScoreRule
    ) -> Tensor:
        keys, values = cache
        _, block_size, kv_heads, dim = keys.shape
        out = query_NW.new_empty(len(query_NW), num_heads, dim)
        tables = batch.block_tables_BM
        sinks = None if rule.sinks_H is None else rule.sinks_H.to(query_NW.dtype).contiguous()
        self._calls["attend", query_NW.dtype](
            query_NW.data_ptr(), query_NW.shape[1], keys.data_ptr(), values.data_ptr(), tables.data_ptr(),
            tables.stride(0), batch.query_starts_B1.data_ptr(), batch.context_lens_B.data_ptr(), len(tables),
            num_heads, kv_heads, dim, block_size, rule.scale, rule.window, rule.softcap, _pointer(sinks),
            out.data_ptr(), self.num_threads,
        )  # fmt: skip
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
