"""Batch-invariant numerics: a token's result has the same bits whatever else is in the batch.

Matrix libraries choose their loop order by the shape of the whole product, so a row's sum may round differently in
a batch of 3 and in one of 40. Everything else in a decoder (norms, rotary embedding, attention, activation,
sampling) is computed row by row in fixed order by rill.models.cpu_kernels and its Triton twin; what is left is the
products, and `invariant_linear` makes those fixed too:

    CPU   the fused path's own products, which sum every element in one order (cpu_product.h); where the processor
          lacks what they need, rows are padded to one of a few sizes, and a size is used only if a one-time check
          on this machine has shown that it gives every row the same bits as the largest one
    CUDA  a Triton product with one tile shape and no split along the summed axis

The engine runs on these with batch_invariant=true. A trainer that wants the very same numbers scores with
`PackedScorer`; one that wants them inside autograd calls `invariant_linear`, whose backward is an ordinary one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from rill.errors import UnsupportedError
from rill.models.attention_paged import KVCache, PagedBatch
from rill.models.cpu_decoder import FusedDecoder, load_fused_kernels
from rill.models.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.decoder import FastPath, build_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROW_SIZES = (16, 32, 64, 128, 256)
"""Rows of one product on the CPU. The last is always allowed: a product of one constant shape."""


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias with every row's bits independent of the others. x is [..., in]."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _InvariantLinear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return _forward(x, weight, bias)


class _InvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = flat_grad.T @ flat_x if ctx.needs_input_grad[1] else None
        grad_bias = flat_grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if x.device.type == "cuda":
        from rill.models.triton_kernels import invariant_matmul

        out = invariant_matmul(flat, weight, bias)
    else:
        fused = load_fused_kernels()
        if fused is not None and fused.supports(x.dtype) and weight.dtype == x.dtype:
            out = fused.linear(flat, weight, bias)
        else:
            out = _padded_product(flat, weight)
            if bias is not None:
                out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _padded_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    sizes = _row_sizes(weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads())
    if rows in sizes:
        return x @ weight.T
    out = x.new_empty(rows, weight.shape[0])
    largest = sizes[-1]
    for start in range(0, rows, largest):
        part = x[start : start + largest]
        size = next(s for s in sizes if s >= len(part))
        if len(part) < size:
            part = pad(part, (0, 0, 0, size - len(part)))
        out[start : start + largest] = (part @ weight.T)[: rows - start]
    return out


@functools.cache
def _row_sizes(num_out: int, num_in: int, dtype: torch.dtype, num_threads: int) -> tuple[int, ...]:
    """The sizes whose rows have the bits of the largest size, found by trying; loop orders do not depend on values."""
    generator = torch.Generator().manual_seed(num_out * 31 + num_in)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    largest = ROW_SIZES[-1]
    x = torch.randn(largest, num_in, generator=generator).to(dtype)
    full = x @ weight.T
    if not torch.equal(x.roll(7, 0) @ weight.T, full.roll(7, 0)):
        raise UnsupportedError(
            f"on this machine a {largest} x {num_in} by {num_in} x {num_out} {dtype} product rounds differently by "
            "row, so batch_invariant cannot be kept: use float32, or set batch_invariant=false"
        )
    return tuple(
        size
        for size in ROW_SIZES
        if all(torch.equal(x[at : at + size] @ weight.T, full[at : at + size]) for at in (0, largest - size))
    )


class PackedScorer:
    """Log-probabilities of packed sequences with the engine's own functions: bit-identical to what it reports.

    For recomputation in a trainer (no gradients). The model's parameters are read in place and never moved.
    """

    def __init__(self, model: PreTrainedModel, *, max_len: int, rows_at_once: int = 256) -> None:
        config = model.config
        kernels = load_cpu_kernels() if model.device.type == "cpu" else None
        fused = load_fused_kernels() if model.device.type == "cpu" else None
        decoder: FastPath | None = None
        self._fused_decoder: FusedDecoder | None = None
        if fused is not None:
            decoder = self._fused_decoder = fused.decoder(model, max_len=max_len)
        if decoder is None and kernels is not None and CpuKernels.supports(model.dtype, config.head_dim or 0):
            decoder = build_decoder(model, kernels, fuse=False, max_len=max_len, linear=invariant_linear)
        if decoder is None:
            raise UnsupportedError(
                f"no batch-invariant path for {config.model_type!r} in {model.dtype} on {model.device.type}"
            )
        self._decoder = decoder
        self._head: Any = model.get_output_embeddings()
        self._config = config
        self._rows_at_once = rows_at_once
        self._softcap: float = config.to_dict().get("final_logit_softcapping") or 0.0

    @torch.no_grad()
    def __call__(self, sequences: Sequence[torch.Tensor], temperature: float = 1.0) -> list[torch.Tensor]:
        """One float32 tensor per sequence: log p of each token given those before it, 0 at position 0."""
        kernels = load_cpu_kernels()
        assert kernels is not None
        if self._fused_decoder is not None:
            self._fused_decoder.rebind()  # the trainer may have moved its parameters since the last call
        lengths = [len(s) for s in sequences]
        ids_N = torch.cat([s.to(torch.int64) for s in sequences])
        hidden_NE = self._hidden(ids_N, lengths)
        results, start = [], 0
        for sequence, length in zip(sequences, lengths, strict=True):
            scores = torch.zeros(length)
            for at in range(0, length - 1, self._rows_at_once):
                stop = min(at + self._rows_at_once, length - 1)
                logits = invariant_linear(hidden_NE[start + at : start + stop], self._head.weight)
                if self._softcap:
                    logits = torch.tanh(logits.float() / self._softcap) * self._softcap
                targets = sequence[at + 1 : stop + 1].to(torch.int64).contiguous()
                scores[at + 1 : stop + 1] = kernels.score(
                    logits, targets, torch.full((stop - at,), temperature)
                )
            results.append(scores)
            start += length
        return results

    def _hidden(self, ids_N: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        config, count = self._config, len(ids_N)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths).cumsum(0)
        longest = max(lengths)
        # Keys and values lie flat, one token to a block: the table of a sequence counts from its first token.
        tables = (starts[:-1, None] + torch.arange(longest, dtype=torch.int32)).contiguous()
        size = (count, 1, config.num_key_value_heads, config.head_dim)
        keys, values = (torch.empty(size, dtype=self._head.weight.dtype) for _ in range(2))
        batch = PagedBatch(
            slots_N=torch.arange(count),
            query_starts_B1=starts,
            context_lens_B=torch.tensor(lengths, dtype=torch.int32),
            block_tables_BM=tables,
            num_decodes=0,
            max_query_len=longest,
            max_context_len=longest,
        )
        layers = config.num_hidden_layers
        positions = torch.cat([torch.arange(n) for n in lengths])
        return self._decoder(ids_N, positions, batch, KVCache([keys] * layers, [values] * layers))
