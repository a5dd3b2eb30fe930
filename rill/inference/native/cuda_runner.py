"""The CUDA runner: steps are enqueued on one stream and read one step late.

    host    build n+1 │ upload, launch n+1 │ read n │ build n+2 │ …
    device  ───── step n ─────►│───── step n+1 ─────►│ …

Sampled tokens stay on the device in `last_tokens`, one per slot, where the next step picks them up; the host sees
them when their copy has arrived. Block tables live on the device too and receive only what changed.

A step in which every sequence has one token is replayed from a CUDA graph, captured on first use for a few batch
sizes and context ranges; rows beyond the batch write to the null block. Other steps are launched kernel by kernel.
Sampling stays outside of the graphs: it is two launches, and its variants would multiply them.

Axes: N token of the flat batch, B sequence, S sampled row, V vocabulary.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rill.errors import EngineError
from rill.inference.native.batch import ScoredRows, StepBatch
from rill.inference.native.model_runner import SCORE_ROWS, ModelRunner, PendingStep, StepResult
from rill.inference.native.sampler import SamplingBatch, apply_edits
from rill.inference.native.triton_sampler import TritonSampler
from rill.models.attention_paged import PagedBatch
from rill.models.decoder import build_decoder
from rill.models.invariant import invariant_linear
from rill.models.triton_kernels import PREFILL_TILE, SPLIT, TritonKernels
from rill.types import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Array = npt.NDArray[np.int32]

NUM_STAGING = 8
"""Pinned buffers, used in turn: a step uploads at most three times and the host is at most one step ahead."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, max_num_seqs + 32, 32)]
    return [s for s in sizes if s < max_num_seqs] + [max_num_seqs]


class Upload:
    """Many small arrays to the device in one copy."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._device = device
        self._staging = [
            torch.empty(num_words, dtype=torch.int32, pin_memory=True) for _ in range(NUM_STAGING)
        ]
        self._views = [t.numpy() for t in self._staging]
        self._turn = 0

    def __call__(self, arrays: list[Array]) -> list[torch.Tensor]:
        """int32 tensors on the device, views of one fresh buffer."""
        starts, at = [], 0
        for array in arrays:
            starts.append(at)
            at += aligned(len(array))
        into = torch.empty(at, dtype=torch.int32, device=self._device)
        self._copy(arrays, starts, at, into)
        return [into[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]

    def fill(self, arrays: list[Array], into_CB: torch.Tensor) -> None:
        """Each array into the start of its row."""
        stride = into_CB.shape[1]
        self._copy(arrays, [stride * i for i in range(len(arrays))], stride * len(arrays), into_CB.view(-1))

    def _copy(self, arrays: list[Array], starts: list[int], end: int, into: torch.Tensor) -> None:
        self._turn = (self._turn + 1) % NUM_STAGING
        staging, view = self._staging[self._turn], self._views[self._turn]
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + len(array)] = array
        into[:end].copy_(staging[:end], non_blocking=True)


def aligned(num_words: int) -> int:
    """Triton compiles a kernel again for every pattern of aligned and unaligned pointers: all are aligned."""
    return -(-num_words // 32) * 32


@dataclass(slots=True)
class CudaStep:
    """A step on its way: its numbers are in pinned memory once `done` has happened."""

    done: torch.cuda.Event
    num_rows: int
    numbers: torch.Tensor
    scores: list[torch.Tensor]

    def result(self) -> StepResult:
        self.done.synchronize()
        host = self.numbers.numpy()
        tokens = host[0, : self.num_rows].tolist()
        logprobs = host[1, : self.num_rows].view(np.float32).tolist()
        return StepResult(tokens, logprobs, [s.cpu().numpy() for s in self.scores])


@dataclass(slots=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    logits_BV: torch.Tensor


class CudaRunner(ModelRunner):
    is_overlapped = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        block_size: int,
        max_len: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        fast_path: bool,
        fuse: bool,
        batch_invariant: bool,
        cuda_graphs: bool,
    ) -> None:
        super().__init__(model, device=device, block_size=block_size)
        self.batch_invariant = batch_invariant
        self.max_num_seqs = max_num_seqs
        shape = self.cache_shape
        heads = int(model.config.num_attention_heads)
        kernels = TritonKernels(
            num_heads=heads,
            head_dim=shape.head_dim,
            max_num_seqs=max_num_seqs,
            max_context=max_len,
            device=device,
        )
        self.kernels = kernels
        linear = invariant_linear if batch_invariant else torch.nn.functional.linear
        if fast_path:
            self.decoder = build_decoder(model, kernels, fuse=fuse, max_len=max_len, linear=linear)
        if batch_invariant and self.decoder is None:
            raise EngineError(
                f"batch_invariant needs the fast path, which {model.config.model_type!r} does not have"
            )
        self.uses_graphs = cuda_graphs and self.decoder is not None
        self._sampler = TritonSampler(max_num_seqs, int(self.head.weight.shape[0]), device)
        # One row beyond the slots: padding of a graph's batch reads and writes there.
        self._num_columns = -(-max_len // block_size)
        self._tables = torch.zeros(max_num_seqs + 1, self._num_columns, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._numbers = torch.empty(2, max_num_seqs, dtype=torch.int32, device=device)
        self._host_numbers = [
            torch.empty(2, max_num_seqs, dtype=torch.int32, pin_memory=True) for _ in range(NUM_STAGING)
        ]
        self._turn = 0
        words = 8 * (max_batched_tokens + max_num_seqs) + 2 * max_num_seqs * self._num_columns + 1024
        self._upload = Upload(words, device)
        self._static = torch.zeros(8, aligned(max_num_seqs), dtype=torch.int32, device=device)
        self._fills = (0, 0, 0, 1, max_num_seqs, 0, 0, 0)
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._pool: Any = None
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)

    # --- life --------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def enter_thread(self) -> None:
        super().enter_thread()
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda.set_stream(self._stream)

    def allocate_cache(self, num_blocks: int) -> None:
        super().allocate_cache(num_blocks)
        torch.cuda.synchronize(self.device)

    def free_cache(self) -> None:
        torch.cuda.synchronize(self.device)
        self.drop_graphs()  # they hold the cache's addresses
        super().free_cache()
        torch.cuda.empty_cache()

    def drop_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None

    def offload_weights(self) -> None:
        """Weights move to pinned host memory; every tensor and view over them stays valid for reload_weights."""
        seen: set[int] = set()
        for tensor in [p.data for p in self.model.parameters()]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            host.copy_(whole)
            self._offloaded.append((storage, host))
        torch.cuda.synchronize(self.device)
        for storage, _ in self._offloaded:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def reload_weights(self) -> None:
        for storage, host in self._offloaded:
            storage.resize_(host.numel())
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            whole.copy_(host, non_blocking=True)
        torch.cuda.synchronize(self.device)
        self._offloaded.clear()

    def record_caller(self) -> object:
        return torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)

    def finish_update(self) -> None:
        # The sender may reuse or unmap its tensors as soon as the update returns.
        self._stream.synchronize()

    # --- a step ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> PendingStep:
        if self.uses_graphs and batch.is_decode_only and not batch.adapters:
            logits_SV, rows = self._replay(batch)
            scores: list[torch.Tensor] = []
        else:
            logits_SV, rows, scores = self._eager(batch)
        num_rows = len(batch.sampled)
        if num_rows:
            self._sample(logits_SV[:num_rows], rows, batch.sampling)
        self._turn = (self._turn + 1) % NUM_STAGING
        host = self._host_numbers[self._turn]
        host.copy_(self._numbers, non_blocking=True)
        return CudaStep(self._stream.record_event(), num_rows, host, scores)

    def _replay(self, batch: StepBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        size = self._sizes[bisect.bisect_left(self._sizes, batch.num_seqs)]
        splits = 1
        while splits * SPLIT < batch.max_context_len:
            splits *= 4
        columns = self._decode_columns(batch)
        if size > batch.num_seqs:
            columns = [np.pad(c, (0, size - len(c)), constant_values=f) for c, f in zip(columns, self._fills)]
        self._upload.fill(columns, self._static)
        self._push_tables(batch)
        graph = self._graphs.get((size, splits))
        if graph is None:
            graph = self._capture(size, splits)
        graph.graph.replay()
        return graph.logits_BV, [self._static[i, : batch.num_seqs] for i in range(4, 8)]

    def _decode_columns(self, batch: StepBatch) -> list[Array]:
        """What a graph reads, one entry per row; `_fills` has what padding rows get."""
        return [
            batch.token_ids_N.astype(np.int32),
            batch.positions_N.astype(np.int32),
            batch.kv_slots_N.astype(np.int32),
            batch.context_lens_B,
            batch.slots_B,
            *_sampling_columns(batch.sampling),
        ]

    def _capture(self, size: int, splits: int) -> DecodeGraph:
        ids, positions, kv_slots, lens, slots = self._static[:5, :size]
        paged = PagedBatch(
            slots_N=kv_slots,
            query_starts_B1=lens,  # not read: there is no prefill in it
            context_lens_B=lens,
            block_tables_BM=self._tables,
            num_decodes=size,
            max_query_len=1,
            max_context_len=splits * SPLIT,
            table_rows_B=slots,
            max_decode_context=splits * SPLIT,
        )

        def run() -> torch.Tensor:
            assert self.decoder is not None
            known = torch.where(ids < 0, self._last_tokens[slots], ids)
            return self._raw_logits(self.decoder(known, positions, paged, self.cache))

        run()  # compiles what has not been compiled; capturing must not
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        # Not through torch.cuda.graph(), which collects garbage and empties the allocator: requests are waiting.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            logits = run()
        finally:
            graph.capture_end()
        captured = DecodeGraph(graph, logits)
        self._graphs[size, splits] = captured
        return captured

    def _eager(self, batch: StepBatch) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        paged, ids, positions, rows_S, columns = self._upload_batch(batch)
        hidden_NE = self._hidden(batch, paged, ids, positions)
        logits_SV = self._raw_logits(hidden_NE[rows_S]) if batch.sampled else hidden_NE[:0]
        return logits_SV, columns, [self._score(hidden_NE, scored) for scored in batch.scored]

    def _upload_batch(
        self, batch: StepBatch
    ) -> tuple[PagedBatch, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        lens, slots, num_decodes = batch.context_lens_B, batch.slots_B, batch.num_decodes
        if self.batch_invariant:
            # One kernel for all: a prompt's token attends like a generated one, or its bits would tell which it was.
            lens = batch.positions_N.astype(np.int32) + 1
            slots = np.repeat(slots, np.diff(batch.query_starts_B1))
            num_decodes = batch.num_tokens
        tiles = [
            (row, offset)
            for row in range(num_decodes, batch.num_seqs)
            for offset in range(0, batch.chunks[row].length, PREFILL_TILE)
        ]
        flat_tiles = np.array(tiles, dtype=np.int32).reshape(-1)
        arrays = [
            batch.token_ids_N.astype(np.int32),
            batch.positions_N.astype(np.int32),
            batch.kv_slots_N.astype(np.int32),
            batch.query_starts_B1,
            lens,
            slots,
            flat_tiles,
            batch.sampled_rows_S.astype(np.int32),
            batch.sampled_slots_S,
            *_sampling_columns(batch.sampling),
        ]
        ids, positions, kv_slots, starts, lens_on, slots_on, tile_words, rows_S, *columns = self._upload(
            arrays
        )
        self._push_tables(batch)
        count = batch.num_decodes
        if count:
            ids[:count] = torch.where(ids[:count] < 0, self._last_tokens[slots_on[:count]], ids[:count])
        paged = PagedBatch(
            slots_N=kv_slots if self.decoder is not None and not batch.adapters else kv_slots.long(),
            query_starts_B1=starts,
            context_lens_B=lens_on,
            block_tables_BM=self._tables,
            num_decodes=num_decodes,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
            table_rows_B=slots_on,
            max_decode_context=int(lens[:num_decodes].max()) if num_decodes else 0,
            prefill_tiles=tile_words.view(-1, 2) if tiles else None,
        )
        return paged, ids, positions, rows_S, columns

    def _hidden(
        self, batch: StepBatch, paged: PagedBatch, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        if self.decoder is not None and not batch.adapters:
            return self.decoder(ids, positions, paged, self.cache)
        return self.module_forward(batch, paged, ids.long(), positions.long())

    def _push_tables(self, batch: StepBatch) -> None:
        if not batch.table_updates:
            return
        width = self._num_columns
        where = np.concatenate([np.arange(s * width + a, s * width + b) for s, a, b in batch.table_updates])
        values = np.concatenate([batch.tables[s, a:b] for s, a, b in batch.table_updates])
        at, new = self._upload([where.astype(np.int32), values])
        self._tables.view(-1).index_copy_(0, at.long(), new)

    def _raw_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """In the model's dtype: the sampler's kernels read that, and half of fp32's bytes."""
        if self.batch_invariant:
            logits_SV = invariant_linear(hidden_SE, self.head.weight)
        else:
            logits_SV = self.head(hidden_SE)
        if self.logit_softcap:
            logits_SV = torch.tanh(logits_SV.float() / self.logit_softcap) * self.logit_softcap
        return logits_SV

    def _sample(self, logits_SV: torch.Tensor, columns: list[torch.Tensor], sampling: SamplingBatch) -> None:
        slots, inv_temperature, is_greedy, uniform = columns
        if sampling.edits:
            logits_SV = logits_SV.float()
            apply_edits(logits_SV, sampling.edits)
        filters = None
        if sampling.is_filtered:
            top_k, top_p, min_p = self._upload(
                [sampling.top_k_S, sampling.top_p_S.view(np.int32), sampling.min_p_S.view(np.int32)]
            )
            filters = (top_k, top_p.view(torch.float32), min_p.view(torch.float32))
        rows = logits_SV.shape[0]
        self._sampler(
            logits_SV,
            inv_temperature.view(torch.float32),
            is_greedy,
            uniform.view(torch.float32),
            slots,
            self._last_tokens,
            self._numbers[0, :rows],
            self._numbers[1, :rows].view(torch.float32),
            filters,
        )

    def _score(self, hidden_NE: torch.Tensor, scored: ScoredRows) -> torch.Tensor:
        parts = [torch.zeros(0, device=self.device)]
        for start in range(0, len(scored.rows), SCORE_ROWS):
            rows = torch.from_numpy(scored.rows[start : start + SCORE_ROWS]).to(self.device)
            targets = torch.from_numpy(scored.targets[start : start + SCORE_ROWS]).to(self.device)
            logits_SV = self._raw_logits(hidden_NE[rows]).float()
            logits_SV /= scored.temperature or 1.0
            parts.append(logits_SV.gather(1, targets[:, None])[:, 0] - logits_SV.logsumexp(dim=-1))
        return torch.cat(parts)

    def score(self, hidden_NE: torch.Tensor, scored: ScoredRows) -> Floats:
        scores: Floats = self._score(hidden_NE, scored).cpu().numpy()
        return scores


def _sampling_columns(sampling: SamplingBatch) -> list[Array]:
    """1/temperature, whether greedy, the uniform number; floats as their bits."""
    is_greedy = sampling.temperature_S == 0
    inverse = (1.0 / np.where(is_greedy, np.float32(1), sampling.temperature_S)).astype(np.float32)
    return [
        inverse.view(np.int32),
        is_greedy.astype(np.int32),
        sampling.uniform_S.astype(np.float32).view(np.int32),
    ]
