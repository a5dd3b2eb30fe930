"""Log-probabilities of packed sequences with the functions of a batch-invariant engine, bit for bit what it reports.

For recomputation in a trainer (no gradients). The model's parameters are read in place and never moved, and the
answers lie on the CPU. Keys and values live for one call, in blocks like the engine's:

    CPU   a sequence is one prompt: the compiled kernels give a row the same bits whatever batch it is in
    CUDA  every token is a row of its own with the context up to itself, as in an engine's batch-invariant step

Called by rill.training with batch_invariant=true; rill.inference.native reports with the same kernels.

Axes: N token of the flat batch, B row of attention, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rill.errors import UnsupportedError
from rill.models.decode.attention_paged import KVCache, PagedBatch
from rill.models.decode.decode_work import Array, DecodeWork, work_in_runs
from rill.models.decode.decoder import Architecture, FastPath, build_decoder, known_architecture
from rill.models.ops.cpu_decoder import FusedDecoder, load_fused_kernels
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.invariant import invariant_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_SIZE = 16
ROWS_AT_ONCE = 256
"""Rows whose logits, and whose attention in pieces, exist at one time."""


class PackedScorer:
    def __init__(self, model: PreTrainedModel, *, max_len: int) -> None:
        """max_len: tokens of the longest sequence that will be scored."""
        arch = known_architecture(model)
        decoder = None if arch is None else _build(model, arch, max_len)
        if arch is None or decoder is None:
            raise UnsupportedError(
                f"no batch-invariant path for {model.config.model_type!r} in {model.dtype} on {model.device.type}"
            )
        self._arch, self._decoder = arch, decoder
        self._head: Any = model.get_output_embeddings()
        self._num_layers = int(model.config.num_hidden_layers)
        self._num_kv_heads = int(model.config.num_key_value_heads)
        self._softcap: float = model.config.to_dict().get("final_logit_softcapping") or 0.0

    @torch.no_grad()
    def __call__(self, sequences: Sequence[torch.Tensor], temperature: float = 1.0) -> list[torch.Tensor]:
        """One float32 tensor per sequence: log p of each token given those before it, 0 at position 0."""
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.rebind()  # the trainer may have moved its parameters since the last call
        lengths = [len(s) for s in sequences]
        ids_N = torch.cat([s.to(self._device, torch.int64) for s in sequences])
        hidden_NE = self._hidden(ids_N, lengths)
        last_N = np.cumsum(lengths) - 1
        rows = torch.from_numpy(np.delete(np.arange(len(ids_N)), last_N)).to(self._device)
        scores_N = torch.zeros(len(ids_N), device=self._device)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            scores_N[part + 1] = self._logprobs(hidden_NE[part], ids_N[part + 1], temperature)
        return list(torch.split(scores_N.cpu(), lengths))

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._head.weight.device
        return device

    def _logprobs(self, hidden_SE: torch.Tensor, targets_S: torch.Tensor, temperature: float) -> torch.Tensor:
        logits_SV = invariant_linear(hidden_SE, self._head.weight)
        if self._softcap:
            logits_SV = torch.tanh(logits_SV.float() / self._softcap) * self._softcap
        temperature_S = torch.full((len(targets_S),), temperature, device=logits_SV.device)
        if logits_SV.device.type == "cuda":
            from rill.models.ops.triton_logprob import token_logprobs

            return token_logprobs(logits_SV, targets_S, 1.0 / temperature_S)
        kernels = load_cpu_kernels()
        assert kernels is not None
        return kernels.score(logits_SV, targets_S, temperature_S)

    def _hidden(self, ids_N: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions_N = np.concatenate([np.arange(n) for n in lengths])
        slots_N = np.repeat(firsts[:-1].astype(np.int64) * BLOCK_SIZE, lengths) + positions_N
        tables = (firsts[:-1, None] + np.arange(max(counts), dtype=np.int32)).astype(np.int32)
        size = (int(firsts[-1]), BLOCK_SIZE, self._num_kv_heads, self._arch.head_dim)
        # Zeros, not garbage: a masked score of NaN is still NaN. One layer's are read before the next one's are made.
        keys, values = (
            torch.zeros(size, dtype=self._head.weight.dtype, device=self._device) for _ in range(2)
        )
        cache = KVCache([keys] * self._num_layers, [values] * self._num_layers)
        slots, on_device = torch.from_numpy(slots_N), torch.from_numpy(tables).to(self._device)
        if self._device.type == "cuda":
            batch = _rows(lengths, positions_N.astype(np.int32), slots.to(self._device), on_device)
        else:
            batch = _prompts(lengths, slots, on_device)
        return self._decoder(ids_N, torch.from_numpy(positions_N).to(self._device), batch, cache)


def _build(model: PreTrainedModel, arch: Architecture, max_len: int) -> FastPath | None:
    if model.device.type == "cuda":
        from rill.models.ops.triton_kernels import TritonKernels

        kernels = TritonKernels(
            num_heads=arch.num_heads,
            num_kv_heads=int(model.config.num_key_value_heads),
            head_dim=arch.head_dim,
            max_num_seqs=ROWS_AT_ONCE,
            device=model.device,
        )
        return build_decoder(model, kernels, fuse=False, max_len=max_len, linear=invariant_linear)
    fused, plain = load_fused_kernels(), load_cpu_kernels()
    decoder = fused.decoder(model, max_len=max_len) if fused is not None else None
    if decoder is None and plain is not None and CpuKernels.supports(model.dtype, arch.head_dim):
        return build_decoder(model, plain, fuse=False, max_len=max_len, linear=invariant_linear)
    return decoder


def _prompts(lengths: list[int], slots_N: torch.Tensor, tables: torch.Tensor) -> PagedBatch:
    """Each sequence as one prompt."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lengths).cumsum(0)
    return PagedBatch(
        slots_N=slots_N,
        query_starts_B1=starts,
        context_lens_B=torch.tensor(lengths, dtype=torch.int32),
        block_tables_BM=tables,
        num_decodes=0,
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )


def _rows(lengths: list[int], positions_N: Array, slots_N: torch.Tensor, tables: torch.Tensor) -> PagedBatch:
    """Each token as a row that generates, with the context up to itself."""
    lens = positions_N + 1
    table_rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    entries, runs = work_in_runs(lens, table_rows, ROWS_AT_ONCE)
    lens_on, rows_on, entries_on = (
        torch.from_numpy(a).to(tables.device) for a in (lens, table_rows, entries)
    )
    return PagedBatch(
        slots_N=slots_N,
        query_starts_B1=lens_on,  # not read: there is no prompt in it
        context_lens_B=lens_on,
        block_tables_BM=tables,
        num_decodes=len(lens),
        max_query_len=1,
        max_context_len=max(lengths),
        table_rows_B=rows_on,
        decode_work=DecodeWork(entries_on, runs),
    )
