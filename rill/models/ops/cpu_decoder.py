"""The engine's shortest way through a decoder on the CPU: cpu_decoder.cpp computes a whole step in one call.

`load_fused_kernels` builds it; `FusedKernels.decoder` binds it to a model that decoder.py knows. Parameters are read
where they lie: nothing is packed or copied, so new values in place need no further word, and `rebind` is called when a
parameter may have moved. Needs AVX-512, and AMX for bfloat16; elsewhere `supports` says no and callers use
decoder.Decoder over torch's products.

Every row has the same bits whatever else is in the batch and however many threads there are, so batch_invariant costs
nothing on this path. One thread at a time may call a decoder: it owns one workspace.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch

from rill.models.decode.attention_paged import KVCache, PagedBatch
from rill.models.decode.decoder import Architecture, known_architecture, rotary_tables
from rill.models.ops.cpu_build import load_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_HEAD_DIM = 256


class _Shape(Structure):
    _fields_ = [
        *((name, c_int64) for name in (
            "hidden", "intermediate", "heads", "kv_heads", "dim", "block_size", "num_layers",
        )),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        *((name, c_int32) for name in ("is_gemma", "is_gelu", "threads", "padding")),
    ]  # fmt: skip


class _LayerWeights(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "q", "k", "v", "out", "gate", "up", "down", "q_bias", "k_bias", "v_bias", "out_bias", "q_norm", "k_norm",
            "input_norm", "feedforward_norm", "post_attention_norm", "post_feedforward_norm",
            "keys", "values",
        )),
        ("window", c_int64),
    ]  # fmt: skip


class _Batch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "num_seqs", "table_stride")),
        *((name, c_void_p) for name in ("positions", "slots", "tables", "starts", "lengths", "cos", "sin")),
    ]


_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "workspace_bytes": ([POINTER(_Shape), c_int64], c_int64),
    "panel_bytes": ([c_int64, c_int64], c_int64),
    "decode": ([POINTER(_Shape), c_void_p, POINTER(_Batch)] + [c_void_p] * 4, None),
    "linear": ([c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int], None),
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@functools.cache
def load_fused_kernels() -> FusedKernels | None:
    """None where there is no compiler."""
    library = load_library("cpu_decoder")
    return None if library is None else FusedKernels(library)


class FusedKernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._dtypes = {dtype for dtype, suffix in _SUFFIXES.items() if library[f"supports_{suffix}"]()}
        self._calls: dict[tuple[str, torch.dtype], Any] = {}
        for dtype in self._dtypes:
            for name, (arguments, result) in _SIGNATURES.items():
                call = library[f"{name}_{_SUFFIXES[dtype]}"]
                call.argtypes, call.restype = arguments, result
                self._calls[name, dtype] = call

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in self._dtypes

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T + bias for x [N, in], with sums in float32 and rows that do not depend on each other."""
        x, weight = x.contiguous(), weight.contiguous()
        rows, k = x.shape
        out = x.new_empty(rows, weight.shape[0])
        panel = torch.empty(self._calls["panel_bytes", x.dtype](rows, k), dtype=torch.uint8)
        self._calls["linear", x.dtype](
            x.data_ptr(), rows, k, weight.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[0],
            out.data_ptr(), panel.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def decoder(self, model: PreTrainedModel, *, max_len: int) -> FusedDecoder | None:
        """None when the model has anything that this path does not compute."""
        architecture = known_architecture(model)
        if architecture is None or not self.supports(model.dtype):
            return None
        if architecture.head_dim > MAX_HEAD_DIM or architecture.head_dim % 2:
            return None
        return FusedDecoder(self._calls, model, architecture, max_len)


class FusedDecoder:
    """Callable like decoder.Decoder."""

    def __init__(
        self,
        calls: dict[tuple[str, torch.dtype], Any],
        model: PreTrainedModel,
        arch: Architecture,
        max_len: int,
    ) -> None:
        self._backbone: Any = model.base_model
        self._arch = arch
        self._decode = calls["decode", model.dtype]
        self._workspace_bytes = calls["workspace_bytes", model.dtype]
        self._cos, self._sin = rotary_tables(model, max_len)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._layers = (_LayerWeights * len(self._backbone.layers))()
        attention, mlp = self._backbone.layers[0].self_attn, self._backbone.layers[0].mlp
        self._shape = _Shape(
            hidden=self._backbone.norm.weight.shape[0],
            intermediate=mlp.gate_proj.weight.shape[0],
            heads=arch.num_heads,
            kv_heads=attention.k_proj.weight.shape[0] // arch.head_dim,
            dim=arch.head_dim,
            num_layers=len(self._layers),
            eps=arch.eps,
            scale=arch.scale,
            softcap=arch.softcap,
            is_gemma=arch.is_gemma,
            is_gelu=arch.is_gelu,
        )
        self.rebind()

    def rebind(self) -> None:
        """Read the parameters' addresses again."""
        for layer, module in zip(self._layers, self._backbone.layers, strict=True):
            for name, tensor in self._parameters(module).items():
                assert tensor is None or tensor.is_contiguous()
                setattr(layer, name, None if tensor is None else tensor.data_ptr())
            layer.window = self._arch.window(module.self_attn)

    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: PagedBatch, cache: KVCache
    ) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm."""
        self._bind_cache(cache)
        hidden = self._backbone.embed_tokens(ids_N)
        out = torch.empty_like(hidden)
        shape, rows, tables = self._shape, len(ids_N), batch.block_tables_BM
        shape.threads = torch.get_num_threads()
        needed = self._workspace_bytes(byref(shape), rows)
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        step = _Batch(
            rows=rows,
            num_seqs=len(tables),
            table_stride=tables.stride(0),
            positions=positions_N.data_ptr(),
            slots=batch.slots_N.data_ptr(),
            tables=tables.data_ptr(),
            starts=batch.query_starts_B1.data_ptr(),
            lengths=batch.context_lens_B.data_ptr(),
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
        )
        self._decode(
            byref(shape), self._layers, byref(step), self._backbone.norm.weight.data_ptr(), hidden.data_ptr(),
            out.data_ptr(), self._workspace.data_ptr(),
        )  # fmt: skip
        return out

    def _bind_cache(self, cache: KVCache) -> None:
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._shape.block_size = cache.keys[0].shape[1]

    def _parameters(self, module: Any) -> dict[str, torch.Tensor | None]:
        attention, mlp, arch = module.self_attn, module.mlp, self._arch
        return {
            "q": attention.q_proj.weight, "q_bias": attention.q_proj.bias,
            "k": attention.k_proj.weight, "k_bias": attention.k_proj.bias,
            "v": attention.v_proj.weight, "v_bias": attention.v_proj.bias,
            "out": attention.o_proj.weight, "out_bias": attention.o_proj.bias,
            "gate": mlp.gate_proj.weight, "up": mlp.up_proj.weight, "down": mlp.down_proj.weight,
            "q_norm": attention.q_norm.weight if arch.has_qk_norm else None,
            "k_norm": attention.k_norm.weight if arch.has_qk_norm else None,
            "input_norm": module.input_layernorm.weight,
            "feedforward_norm": (
                module.pre_feedforward_layernorm if arch.has_post_norms else module.post_attention_layernorm
            ).weight,
            "post_attention_norm": module.post_attention_layernorm.weight if arch.has_post_norms else None,
            "post_feedforward_norm": module.post_feedforward_layernorm.weight if arch.has_post_norms else None,
        }  # fmt: skip
