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
from torch import Tensor

from rill.errors import UnsupportedError
from rill.models.decode.attention_paged import LayerCache, PagedBatch
from rill.models.decode.decode_work import Array, DecodeWork, work_in_runs
from rill.models.decode.decoder import Decoder
from rill.models.decode.structure import read_structure
from rill.models.eager import LogitRule, Probe, probe_model
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
        self._probe = probe_model(model)
        decoder = _build(model, self._probe, max_len)
        if decoder is None:
            raise UnsupportedError(
                f"no batch-invariant path for {model.config.model_type!r} in {model.dtype} on {model.device.type}"
            )
        self._decoder = decoder
        self._head: Any = model.get_output_embeddings()
        self._device: torch.device = self._head.weight.device
        self._rule = LogitRule.of(model.config)

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        """One float32 tensor per sequence: log p of each token given those before it, 0 at position 0."""
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

    def _logprobs(self, hidden_SE: Tensor, targets_S: Tensor, temperature: float) -> Tensor:
        logits_SV = self._rule(invariant_linear(hidden_SE, self._head.weight, self._head.bias))
        if logits_SV.device.type == "cuda":
            from rill.models.ops.triton_logprob import token_logprobs

            temperature_S = torch.full((len(targets_S),), temperature, device=logits_SV.device)
            return token_logprobs(logits_SV, targets_S, 1.0 / temperature_S)
        logprobs_SV = (logits_SV.float() / (temperature or 1.0)).log_softmax(-1)
        return logprobs_SV.gather(1, targets_S[:, None])[:, 0]

    def _hidden(self, ids_N: Tensor, lengths: list[int]) -> Tensor:
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions_N = np.concatenate([np.arange(n) for n in lengths])
        slots_N = np.repeat(firsts[:-1].astype(np.int64) * BLOCK_SIZE, lengths) + positions_N
        tables = (firsts[:-1, None] + np.arange(max(counts), dtype=np.int32)).astype(np.int32)
        calls = self._probe.calls
        size = (int(firsts[-1]), BLOCK_SIZE, calls[0].num_kv_heads, calls[0].key_dim)
        # Zeros, not garbage: a masked score of NaN is still NaN. One layer's are read before the next one's are made.
        like = self._head.weight
        cache = [LayerCache(like.new_zeros(size), like.new_zeros(size))] * len(calls)
        slots, on_device = torch.from_numpy(slots_N), torch.from_numpy(tables).to(self._device)
        if self._device.type == "cuda":
            batch = _rows(lengths, positions_N.astype(np.int32), slots.to(self._device), on_device)
        else:
            batch = _prompts(lengths, slots, on_device)
        return self._decoder(ids_N, torch.from_numpy(positions_N).to(self._device), batch, cache)


def _build(model: PreTrainedModel, probe: Probe, max_len: int) -> Decoder | None:
    if len({(call.num_heads, call.num_kv_heads, call.key_dim) for call in probe.calls}) > 1:
        return None
    structure = read_structure(model, probe, fuse=False, max_len=max_len)
    if structure is None or not structure.is_dense:
        return None
    call = probe.calls[0]
    if model.device.type == "cuda":
        from rill.models.ops.triton_decode import DecodeAttention
        from rill.models.ops.triton_kernels import TritonKernels

        decode = DecodeAttention(
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.key_dim,
            max_rows=ROWS_AT_ONCE,
            device=model.device,
        )
        return Decoder(structure, TritonKernels(decode), invariant_linear)
    plain = load_cpu_kernels()
    if plain is None or not CpuKernels.supports(model.dtype, call.key_dim):
        return None
    return Decoder(structure, plain, invariant_linear)


def _prompts(lengths: list[int], slots_N: Tensor, tables: Tensor) -> PagedBatch:
    """Each sequence as one prompt."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lengths).cumsum(0)
    return PagedBatch(
        slots_N=slots_N,
        query_starts_B1=starts,
        context_lens_B=torch.tensor(lengths, dtype=torch.int32),
        block_tables_BM=tables,
        num_decodes=0,
    )


def _rows(lengths: list[int], positions_N: Array, slots_N: Tensor, tables: Tensor) -> PagedBatch:
    """Each token as a row that generates, with the context up to itself."""
    lens = positions_N + 1
    table_rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    entries, pieces, runs = work_in_runs(lens, table_rows, ROWS_AT_ONCE)
    lens_on, rows_on, entries_on, pieces_on = (
        torch.from_numpy(a).to(tables.device) for a in (lens, table_rows, entries, pieces)
    )
    return PagedBatch(
        slots_N=slots_N,
        query_starts_B1=lens_on,  # not read: there is no prompt in it
        context_lens_B=lens_on,
        block_tables_BM=tables,
        num_decodes=len(lens),
        table_rows_B=rows_on,
        decode_work=DecodeWork(entries_on, runs, pieces_on),
    )
