"""Captured steps of prompts: without them the host needs ten times as long to launch a short prompt's kernels as the
device to run them.

There is one graph for each of a few numbers of tokens. It computes every chunk of a step in one go, so that chunks see
the keys and values that others of them write; sequences in the middle of generation have a decode graph of their own in
the same step. Inputs lie in one buffer, filled by one copy; tokens beyond the step's write to the null block, and tiles
of attention beyond it belong to a sequence without tokens.

    ids │ positions │ kv slots │ first row of each sequence │ context lengths │ table rows │ tiles
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from rill.inference.native.batch import StepBatch
from rill.inference.native.decode_graphs import Array, Upload, aligned, capture
from rill.models.decode.attention_paged import PagedBatch
from rill.models.ops.triton_kernels import PREFILL_TILE

SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536)
"""Tokens of a step. Larger ones keep the device busy while the host launches them."""
_TOKENS_PER_SEQ = 4
"""A graph has room for so few tokens to a sequence: samples of one prompt compute no more than its last."""

RunPrompts = Callable[[torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]
"""Token ids, positions, where they belong -> hidden states."""


class PromptGraphs:
    def __init__(
        self,
        max_batched_tokens: int,
        tables: torch.Tensor,
        upload: Upload,
        run: RunPrompts,
        stream: torch.cuda.Stream,
    ) -> None:
        """`tables`: block tables with one row per slot and one more, which padding reads."""
        self._sizes = [size for size in SIZES if size <= max_batched_tokens]
        self._tables, self._upload, self._run, self._stream = tables, upload, run, stream
        num_words = max((self._starts(size)[-1] for size in self._sizes), default=0)
        self._inputs = torch.zeros(num_words, dtype=torch.int32, device=tables.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        """And the hidden states that it writes."""
        self._pool: Any = None

    @staticmethod
    def num_words() -> int:
        """The most that one replay uploads."""
        return PromptGraphs._starts(SIZES[-1])[-1]

    def size_of(self, batch: StepBatch) -> int | None:
        """Which graph computes the step's chunks, if any does."""
        num_tokens, num_seqs = batch.num_tokens - batch.num_running, batch.num_seqs - batch.num_running
        if batch.pictures is not None or batch.adapters or not num_seqs:
            return None
        at = bisect.bisect_left(self._sizes, max(num_tokens, num_seqs * _TOKENS_PER_SEQ))
        return self._sizes[at] if at < len(self._sizes) else None

    def capture_all(self) -> None:
        """Largest first, so that others reuse its memory."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size)

    def drop(self) -> None:
        self._graphs.clear()
        self._pool = None

    def replay(self, batch: StepBatch, size: int) -> torch.Tensor:
        """Hidden states, of which those of the step's chunks count: the first ones."""
        first = batch.num_running
        num_seqs, max_seqs = batch.num_seqs - first, size // _TOKENS_PER_SEQ
        rows_B1 = batch.query_starts_B1[first:] - first
        counts = np.diff(rows_B1).tolist()
        tiles = [(row, at) for row, count in enumerate(counts) for at in range(0, count, PREFILL_TILE)]
        starts = self._starts(size)
        view = self._upload.stage(starts[-1])
        columns: list[tuple[Any, int]] = [
            (batch.token_ids_N[first:], 0),
            (batch.positions_N[first:], 0),
            (batch.kv_slots_N[first:], 0),
            (rows_B1, int(rows_B1[-1])),
            (batch.context_lens_B[first:], 0),
            (batch.slots_B[first:], len(self._tables) - 1),
        ]
        for (values, fill), start, end in zip(columns, starts[:-1], starts[1:], strict=False):
            view[start : start + len(values)] = values
            view[start + len(values) : end] = fill
        assert num_seqs <= max_seqs
        at_tiles: Array = view[starts[-2] : starts[-1]].reshape(-1, 2)
        at_tiles[: len(tiles)] = tiles
        at_tiles[len(tiles) :] = (max_seqs, 0)
        self._upload.send(starts[-1], self._inputs)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, hidden_NE = self._graphs[size]
        graph.replay()
        return hidden_NE

    @staticmethod
    def _starts(size: int) -> list[int]:
        """Of each part of the buffer, and its end."""
        num_seqs = size // _TOKENS_PER_SEQ
        num_tiles = size // PREFILL_TILE + num_seqs
        lengths = (size, size, size, num_seqs + 2, num_seqs + 1, num_seqs + 1, 2 * num_tiles)
        return list(accumulate(map(aligned, lengths), initial=0))

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        starts, num_seqs = self._starts(size), size // _TOKENS_PER_SEQ
        ids, positions, kv_slots = (self._inputs[at : at + size] for at in starts[:3])
        paged = PagedBatch(
            slots_N=kv_slots,
            query_starts_B1=self._inputs[starts[3] : starts[3] + num_seqs + 2],
            context_lens_B=self._inputs[starts[4] : starts[4] + num_seqs + 1],
            block_tables_BM=self._tables,
            num_decodes=0,
            table_rows_B=self._inputs[starts[5] : starts[5] + num_seqs + 1],
            prefill_tiles=self._inputs[starts[6] : starts[7]].view(-1, 2),
        )
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(lambda: self._run(ids, positions, paged), self._stream, self._pool)
