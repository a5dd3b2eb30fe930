"""Typed calls into cpu_kernels.cpp: products, attention, norms, rotary embedding, activation, sampling on the CPU.

Where there is no compiler `load_cpu_kernels` returns None and callers use torch. Rows are bit-identical whatever the
batch and the number of threads; rill.models.ops.invariant relies on it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch

from rill.models.decode.attention_paged import PagedBatch
from rill.models.ops.cpu_build import load_library
from rill.models.ops.torch_kernels import TorchKernels

_SIGNATURES: dict[str, list[Any]] = {
    "add_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float, c_int, c_int],
    "act_mul": [c_void_p] * 2 + [c_int64] * 2 + [c_int, c_int],
    "rope_store": [c_void_p] * 7 + [c_float] + [c_void_p] * 2 + [c_int64] * 4 + [c_int],
    "attend": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    + [c_int64] * 5
    + [c_float, c_int64, c_float, c_void_p, c_void_p, c_int],
    "score": [c_void_p] * 2 + [c_int64] * 2 + [c_void_p, c_void_p, c_int],
    "sample": [c_void_p] + [c_int64] * 2 + [c_void_p] * 7 + [c_int],
}
PRODUCT_DTYPES = (torch.float32, torch.bfloat16)
_LINEAR: list[Any] = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int]


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """The kernels, built if need be; None where they cannot be."""
    library = load_library("cpu_kernels")
    return None if library is None else CpuKernels(library)


class CpuKernels(TorchKernels):
    """Typed calls into the library. Tensors are contiguous unless a stride is passed; dtype float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls: dict[tuple[str, torch.dtype], Any] = {}
        for suffix, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            for name, arguments in _SIGNATURES.items():
                call = library[f"{name}_{suffix}"]
                call.argtypes, call.restype = arguments, None
                self._calls[name, dtype] = call
        self._panel_bytes = library["panel_bytes"]
        self._panel_bytes.argtypes, self._panel_bytes.restype = [c_int64, c_int64], c_int64
        self.has_products: bool = self._panel_bytes(1, 1) > 0
        """Whether linear() is here: it needs AVX-512."""
        if self.has_products:
            for suffix, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
                call = library[f"linear_{suffix}"]
                call.argtypes, call.restype = _LINEAR, None
                self._calls["linear", dtype] = call
        self.num_threads = torch.get_num_threads()

    @staticmethod
    def supports(dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in (torch.float32, torch.bfloat16) and head_dim <= 256

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T + bias for x [N, in], with sums in float32; torch's where has_products is false.

        Weights are read where they lie: nothing is packed or copied, so new values in place need no further word.
        """
        if not self.has_products:
            return super().linear(x, weight, bias)
        x, weight = x.contiguous(), weight.contiguous()
        rows, k = x.shape
        out = x.new_empty(rows, weight.shape[0])
        panel = torch.empty(self._panel_bytes(rows, k), dtype=torch.uint8)
        self._calls["linear", x.dtype](
            x.data_ptr(), rows, k, weight.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[0],
            out.data_ptr(), panel.data_ptr(), self.num_threads,
        )  # fmt: skip
        return out

    def add_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool,
    ) -> torch.Tensor:
        """hidden += addend, in place; returns RMSNorm(hidden)."""
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        self._calls["add_norm", hidden.dtype](
            hidden.data_ptr(), None if addend is None else addend.data_ptr(), weight.data_ptr(), out.data_ptr(),
            rows, size, eps, gemma, self.num_threads,
        )  # fmt: skip
        return out

    def act_mul(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._calls["act_mul", gate_up.dtype](
            gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gelu, self.num_threads
        )
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_heads: int,
    ) -> None:
        kv_heads, dim = keys.shape[2:]
        self._calls["rope_store", qkv.dtype](
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(), eps,
            keys.data_ptr(), values.data_ptr(), qkv.shape[0], num_heads, kv_heads, dim, self.num_threads,
        )  # fmt: skip

    def attend_flat(
        self,
        query: torch.Tensor,
        query_stride: int,
        num_heads: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` may be the leading part of wider rows, `query_stride` elements apart. Returns [N, H, D]."""
        _, block_size, kv_heads, dim = keys.shape
        out = query.new_empty(query.shape[0], num_heads, dim)
        tables = batch.block_tables_BM
        sinks = None if sinks_H is None else sinks_H.to(query.dtype).contiguous()
        self._calls["attend", query.dtype](
            query.data_ptr(), query_stride, keys.data_ptr(), values.data_ptr(), tables.data_ptr(), tables.stride(0),
            batch.query_starts_B1.data_ptr(), batch.context_lens_B.data_ptr(), tables.shape[0], num_heads, kv_heads,
            dim, block_size, scale, window, softcap, None if sinks is None else sinks.data_ptr(),
            out.data_ptr(), self.num_threads,
        )  # fmt: skip
        return out

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        uniform: torch.Tensor,
        *,
        filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities; see rill.inference.native.sampler for what they mean.

        `filters`: top-k (int32), top-p and min-p (float32) of each row.
        """
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        top_k, top_p, min_p = (None, None, None) if filters is None else (f.data_ptr() for f in filters)
        self._calls["sample", logits.dtype](
            logits.data_ptr(), rows, vocab, temperature.data_ptr(), top_k, top_p, min_p, uniform.data_ptr(),
            tokens.data_ptr(), logprobs.data_ptr(), self.num_threads,
        )  # fmt: skip
        return tokens, logprobs

    def score(self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """log softmax(logits / temperature)[target] of each row, with the bits that sample() would report."""
        logprobs = torch.empty(len(targets), dtype=torch.float32)
        self._calls["score", logits.dtype](
            logits.data_ptr(),
            targets.data_ptr(),
            *logits.shape,
            temperature.data_ptr(),
            logprobs.data_ptr(),
            self.num_threads,
        )
        return logprobs
