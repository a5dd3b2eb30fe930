"""Captured decode steps: a step in which every sequence has one token is one launch.

A graph's inputs go into the next of a ring of buffers, on a stream of their own while the device still computes. Its
first kernel takes them from there to fixed places, where the others read them, and its last ones sample: so nothing
lies between two steps but the end of one graph and the start of the next.

    ids │ positions │ kv slots │ context lengths │ table rows │ sampling … │ adapters │ pieces │ … │ attention's list
    ◄──────────── one column of a word to each row ───────────────────────────────────────────►

There is one for each of a few batch sizes, captured before the first request with a work list of attention that most
batches fit in; on first use for lists of two, four, … times as many entries, for rows that are cut where most are not,
for adapters and for prompts that rows share. Rows beyond the batch write to the null block and are not in the list.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rill.inference.native.batch import StepBatch
from rill.inference.native.sampler import SamplingBatch
from rill.models.decode.attention_paged import PagedBatch
from rill.models.decode.decode_work import (
    GROUP_ROWS,
    MAX_OWN_PIECES,
    MAX_PIECES,
    MIN_ROWS,
    MIN_SHARED,
    WORDS,
    DecodeWork,
    Run,
    SharedWork,
    pieces_of,
    shared_work,
    spread,
    work_list,
)
from rill.models.decode.low_rank import NO_ADAPTER

Array = npt.NDArray[np.int32]

NUM_PROGRAMS = 512
"""Of attention, that keep a device busy: about four to a multiprocessor."""
MIN_SHARED_ENTRIES = 64
NUM_COLUMNS = 16
IDS_COLUMN, POSITIONS_COLUMN, KV_COLUMN, LENS_COLUMN, SLOTS_COLUMN = range(5)
SAMPLING_COLUMNS = range(SLOTS_COLUMN, 11)
"""Table rows, 1/temperature, greedy, uniform, top-k, top-p, min-p: what the sampler reads."""
PLACE_COLUMN, ADAPTER_COLUMN, PIECES_COLUMN, CHANGES_COLUMN = 11, 12, 13, 14
"""Where results go, the place 0 being nobody's; of the block tables what changes, and to what."""
ALL = int(np.float32(1).view(np.int32))
"""Top-p that drops nothing."""
NUM_LARGE = 6


class StepInputs(NamedTuple):
    """Of a captured step, on the device: columns, and attention's list behind them."""

    words: torch.Tensor
    size: int

    @property
    def stride(self) -> int:
        return aligned(self.size)

    def column(self, index: int) -> torch.Tensor:
        return self.words[index * self.stride : index * self.stride + self.size]

    def sampling(self) -> list[torch.Tensor]:
        return [self.column(i) for i in SAMPLING_COLUMNS]


RunStep = Callable[["StepRing", StepInputs, PagedBatch, bool], torch.Tensor]
"""From taking the inputs to sampling; with adapters, or without. Returns logits."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, max_num_seqs + 64, 64)]
    return [s for s in sizes if s < max_num_seqs] + [max_num_seqs]


class GraphKey(NamedTuple):
    size: int
    num_entries: int
    """Of the attention's work list."""
    is_cut: bool
    """Some row is more than one piece."""
    has_adapters: bool
    num_shared: int = 0
    """Entries of the list of what rows share."""


class DecodeGraphs:
    def __init__(
        self,
        max_num_seqs: int,
        tables: torch.Tensor,
        upload: Upload,
        run: RunStep,
        stream: torch.cuda.Stream,
        *,
        num_staging: int,
        num_entries: int,
        is_invariant: bool,
        shares_prefixes: bool,
        num_new: int,
    ) -> None:
        """`tables`: block tables with one row per slot and one more, which padding reads.

        num_staging: steps that are under way at one time, at most; num_entries: of attention's work, that keep the
        device busy; is_invariant: a row's cut is its own affair;
        shares_prefixes: what the samples of one prompt have in common is read once for all of them;
        num_new: tokens of a sequence in one step, at most."""
        self.shares_prefixes, self._num_new = shares_prefixes, num_new
        self._sizes = graph_sizes(max_num_seqs)
        self._num_entries, self._is_invariant = num_entries, is_invariant
        self._tables, self._upload, self._run, self._stream = tables, upload, run, stream
        num_words = NUM_COLUMNS * aligned(max_num_seqs)
        num_words += 2 * max(max_num_seqs * MAX_PIECES, 2 * NUM_PROGRAMS) * WORDS
        self._ring = StepRing(num_words, num_staging, tables.device, stream)
        self._inputs = torch.zeros(num_words, dtype=torch.int32, device=tables.device)
        self._shared_at = aligned(max_num_seqs // MIN_ROWS * GROUP_ROWS)
        self._shared = torch.zeros(
            self.num_shared_words(max_num_seqs), dtype=torch.int32, device=tables.device
        )
        self._fills = (0, 0, 0, 1, max_num_seqs, 0, 0, 0, 0, ALL, 0, 0, NO_ADAPTER, 0, -1, 0)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        """And the logits that it writes."""
        self._pool: Any = None

    @staticmethod
    def num_shared_words(max_num_seqs: int) -> int:
        """The most that one replay uploads: members of every group, then the entries of their lists, in steps of eight
        times as many."""
        num_groups = max_num_seqs // MIN_ROWS
        num_entries = 8 * max(num_groups * MAX_OWN_PIECES, MIN_SHARED_ENTRIES)
        return aligned(num_groups * GROUP_ROWS) + num_entries * WORDS

    def capture_all(self, max_rows: int) -> None:
        """One for every size, with the list that most batches need; largest first, so that others reuse its memory."""
        for size in reversed(self._sizes[: bisect.bisect_left(self._sizes, max_rows) + 1]):
            is_cut = size < self._num_entries
            key = GraphKey(size, self._least_entries(size), is_cut, has_adapters=False)
            self._graphs[key] = self._capture(key)

    def replay(
        self, batch: StepBatch, adapters_B: Array | None, place: int, changes: tuple[Array, Array]
    ) -> torch.Tensor:
        """Logits, of which the first num_seqs rows count. Tokens and log-probabilities go to `place`, above 0; changes:
        of the block tables, no more than rows."""
        count = batch.num_seqs
        size = self._size_of(count)
        lens = batch.context_lens_B
        shared = self._shared_of(batch) if self.shares_prefixes else None
        tokens_B = None if shared is None else shared.tokens_B
        own = lens if tokens_B is None else lens - tokens_B
        piece = None if self._is_invariant else spread(own, self._num_entries)
        work = work_list(lens, batch.slots_B, piece, tokens_B)
        pieces_B = pieces_of(work, count)
        is_cut = size < self._num_entries or bool(pieces_B.max() > 1)
        columns = [
            batch.token_ids_N,
            batch.positions_N,
            batch.kv_slots_N,
            batch.context_lens_B,
            batch.slots_B,
            *sampling_columns(batch.sampling),
            place,
            NO_ADAPTER if adapters_B is None else adapters_B,
            pieces_B,
            *changes,
        ]
        num_entries = self._least_entries(size)
        while num_entries < len(work):
            num_entries *= 2
        num_shared = 0 if shared is None else self._send_shared(shared)
        key = GraphKey(size, num_entries, is_cut, adapters_B is not None, num_shared)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        graph, logits_BV = self._graphs[key]
        self._fill(columns, count, size, work, num_entries)
        graph.replay()
        self._ring.advance()
        return logits_BV

    def sampling_columns(self, count: int) -> list[torch.Tensor]:
        """Of the first rows of the step that was replayed last."""
        inputs = StepInputs(self._inputs, self._size_of(count))
        return [column[:count] for column in inputs.sampling()]

    def _size_of(self, count: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, count)]

    def _fill(
        self,
        columns: Sequence[npt.NDArray[np.integer[Any]] | int],
        count: int,
        size: int,
        work: Array,
        num_entries: int,
    ) -> None:
        view, stride = self._ring.next, aligned(size)
        pack(view, columns, self._fills, count, size, stride)
        at = NUM_COLUMNS * stride
        view[at : at + work.size] = work.reshape(-1)
        end = at + num_entries * WORDS
        view[at + work.size : end] = 0  # an entry of zeros is no work
        self._ring.send(end)

    def _shared_of(self, batch: StepBatch) -> SharedWork | None:
        blocks_B = batch.prefix_blocks[batch.slots_B]
        prefixes_B = blocks_B * batch.block_size
        if prefixes_B.max() < MIN_SHARED:
            return None
        # Who has the same block there has the same ones before it, or ones of the same contents.
        keys_B = batch.tables[batch.slots_B, blocks_B - 1]
        return shared_work(batch.context_lens_B, batch.slots_B, prefixes_B, keys_B)

    def _send_shared(self, shared: SharedWork) -> int:
        """How many entries a graph must launch."""
        entries, members = shared.entries, shared.members
        num_entries = MIN_SHARED_ENTRIES
        while num_entries < len(entries):
            num_entries *= 8  # an empty entry costs next to nothing, another graph a capture
        end = self._shared_at + num_entries * WORDS
        view = self._upload.stage(end)
        view[: members.size] = members.reshape(-1)
        view[self._shared_at : self._shared_at + entries.size] = entries.reshape(-1)
        view[self._shared_at + entries.size : end] = 0
        self._upload.send(end, self._shared)
        return num_entries

    def drop(self) -> None:
        self._graphs.clear()
        self._pool = None

    def drop_adapted(self) -> None:
        """Adapters were loaded or unloaded: those that read them are void."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key.has_adapters}

    def _least_entries(self, size: int) -> int:
        """What spread() makes of so many rows; a few empty entries are cheaper than another graph."""
        if size >= self._num_entries:
            return size
        return min(size * MAX_PIECES, self._num_entries + size)

    def _capture(self, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        size, work_at = key.size, NUM_COLUMNS * aligned(key.size)
        inputs = StepInputs(self._inputs[: work_at + key.num_entries * WORDS], size)
        lens = inputs.column(LENS_COLUMN)
        end = self._shared_at + key.num_shared * WORDS
        work = DecodeWork(
            inputs.words[work_at:],
            (Run(0, size, 0, key.num_entries),),
            inputs.column(PIECES_COLUMN) if key.is_cut else None,
            members=self._shared[: self._shared_at],
            shared=self._shared[self._shared_at : end].view(-1, WORDS) if key.num_shared else None,
            num_new=self._num_new,
        )
        paged = PagedBatch(
            slots_N=inputs.column(KV_COLUMN),
            query_starts_B1=lens,  # not read: there is no prefill in it
            context_lens_B=lens,
            block_tables_BM=self._tables,
            num_decodes=size,
            table_rows_B=inputs.column(SLOTS_COLUMN),
            decode_work=work,
        )
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # The first run is a step too, of nobody: all rows are padding.
        self._fill([0] * NUM_COLUMNS, 0, size, np.zeros(0, dtype=np.int32), key.num_entries)
        captured = capture(
            lambda: self._run(self._ring, inputs, paged, key.has_adapters), self._stream, self._pool
        )
        self._ring.advance()
        return captured


def capture(
    run: Callable[[], torch.Tensor], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph, and what it writes."""
    run()  # compiles what has not been compiled; capturing must not
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    # Not through torch.cuda.graph(), which collects garbage and empties the allocator: requests are waiting.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        written = run()
    finally:
        graph.capture_end()
    return graph, written


def pack(
    view: Array,
    columns: Sequence[npt.NDArray[np.integer[Any]] | int],
    fills: Sequence[int],
    count: int,
    size: int,
    stride: int,
) -> None:
    """Each column into its own stride: its words, or one word for all of `count`, and its fill up to `size`."""
    for index, (column, fill) in enumerate(zip(columns, fills, strict=True)):
        at = index * stride
        end = at + (count if isinstance(column, int) else len(column))
        view[at:end] = column
        view[end : at + size] = fill


def sampling_columns(sampling: SamplingBatch) -> list[Array]:
    """1/temperature, whether greedy, the uniform number, top-k, top-p, min-p; floats as their bits."""
    is_greedy = sampling.temperature_S == 0
    inverse = (1.0 / np.where(is_greedy, np.float32(1), sampling.temperature_S)).astype(np.float32)
    return [
        inverse.view(np.int32),
        is_greedy.astype(np.int32),
        sampling.uniform_S.astype(np.float32).view(np.int32),
        sampling.top_k_S,
        sampling.top_p_S.view(np.int32),
        sampling.min_p_S.view(np.int32),
    ]


def aligned(num_words: int) -> int:
    """Triton compiles a kernel again for every pattern of aligned and unaligned pointers: all are aligned."""
    return -(-num_words // 32) * 32


class StepRing:
    """Inputs of steps, on the host and on the device: a buffer to each step, used in turn, and written again when its
    step is long done. The device counts too, so that a graph finds its own."""

    def __init__(
        self, num_words: int, num_buffers: int, device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        self._staged = torch.zeros(num_buffers, aligned(num_words), dtype=torch.int32, pin_memory=True)
        self.words = torch.zeros_like(self._staged, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._views: list[Array] = list(self._staged.numpy())
        self._stream, self._copies = stream, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def next(self) -> Array:
        """Of the step that is launched next."""
        return self._views[self._turn]

    def send(self, num_words: int) -> None:
        """To the device, while it still computes what was launched before; what is launched now waits for it."""
        with torch.cuda.stream(self._copies):
            self.words[self._turn, :num_words].copy_(self._staged[self._turn, :num_words], non_blocking=True)
        self._stream.wait_stream(self._copies)

    def advance(self) -> None:
        """The step was launched."""
        self._turn = (self._turn + 1) % len(self._views)


class Upload:
    """Small arrays from the host to the device, many in one copy and without waiting for it. Writes into pinned buffers
    that are used in turn: one is written again when its copy is long done."""

    def __init__(self, num_words: int, num_usual: int, device: torch.device, num_staging: int) -> None:
        """num_staging buffers of num_usual words, as many as are ever under way at one time, and a few of num_words for
        what is larger: prompts and whole block tables, at most two in a turn of the host."""
        self._device = device
        sizes = [(num_usual, num_staging), (max(num_words, num_usual), NUM_LARGE)]
        self._rings = [(words, cycle([_pinned(words) for _ in range(count)])) for words, count in sizes]
        self._staged = next(self._rings[0][1])

    def __call__(self, arrays: list[Array]) -> list[torch.Tensor]:
        """int32 tensors on the device, views of one fresh buffer."""
        starts, at = [], 0
        for array in arrays:
            starts.append(at)
            at += aligned(len(array))
        into = torch.empty(at, dtype=torch.int32, device=self._device)
        view = self.stage(at)
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + len(array)] = array
        self.send(at, into)
        return [into[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]

    def stage(self, num_words: int) -> Array:
        """The next staging buffer for so many words, to be written and sent. What it holds is undefined."""
        self._staged = next(next(ring for words, ring in self._rings if words >= num_words))
        return self._staged[1]

    def send(self, num_words: int, into: torch.Tensor) -> None:
        """The first words of the buffer that stage() gave last."""
        into[:num_words].copy_(self._staged[0][:num_words], non_blocking=True)


def _pinned(num_words: int) -> tuple[torch.Tensor, Array]:
    buffer = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
    return buffer, buffer.numpy()
