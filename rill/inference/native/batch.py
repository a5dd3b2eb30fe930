"""Turns the scheduler's work into the flat arrays that the steps of a turn compute on.

What stays the same from step to step for a running sequence (its block table, its sampling parameters) lives in
tables with one row per slot, so that a step of pure generation is built by a few NumPy operations however many
sequences take part. The later steps of a turn differ from the first by their positions, and by who is left. A step that
looks at drafts is a step of pure generation too: every drafted token is a row of its own, and sees those before it
because a layer writes all keys and values before it reads any.

Axes: N token of the flat batch, B sequence, S sampled row, M block-table column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rill.inference.native.block_manager import NULL_BLOCK
from rill.inference.native.logit_edits import LogitEdits
from rill.inference.native.sampler import SamplingBatch, uniforms
from rill.inference.native.scheduler import Chunk, Work
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.models.vision import PictureRows, PictureSpan
from rill.types import SamplingParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

IN_FLIGHT = -1
"""Stands for a token that the step before samples: the device fills it in."""


@dataclass(slots=True)
class ScoredRows:
    """Rows whose log-probability of a known next token is wanted; of an embedding, the last row itself."""

    chunk: Chunk
    rows: Int64s
    targets: Int64s
    temperature: float
    last_row: int
    is_embedding: bool


@dataclass(slots=True)
class StepBatch:
    token_ids_N: Int64s
    positions_N: Int64s
    """What tokens are turned by; behind a picture that is less than their index."""
    kv_slots_N: Int64s
    slots_B: Int32s
    query_starts_B1: Int32s
    context_lens_B: Int32s
    tables: Int32s
    """The builder's own, one row per slot; see block_tables."""
    prefix_blocks: Int32s
    """The builder's own, by slot: whole blocks of the prompt, which samples of one prompt have in common."""
    table_updates: list[tuple[int, int, int]]
    """(slot, first column, end column) of what changed in `tables` since the batch before."""
    num_decodes: int
    sampled: list[Sequence]
    sampled_rows_S: Int64s
    """Index into N of each sampled sequence's newest token."""
    sampled_slots_S: Int32s
    sampling: SamplingBatch
    scored: list[ScoredRows]
    block_size: int
    adapters: dict[str, Int64s]
    """Rows of the flat batch by adapter; empty when all use the base model."""
    pictures: PictureRows | None = None
    """Where a prompt has some; positions_N then holds for generated tokens alone."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def num_seqs(self) -> int:
        return len(self.slots_B)

    @property
    def block_tables(self) -> Int32s:
        num_columns = -(-self.max_context_len // self.block_size)
        return self.tables[self.slots_B, :num_columns]

    @property
    def is_decode_only(self) -> bool:
        """Every sequence has one new token, and samples the next."""
        return self.pictures is None and self.num_decodes == len(self.sampled_rows_S) == self.num_seqs

    @property
    def max_context_len(self) -> int:
        return int(self.context_lens_B.max())


class BatchBuilder:
    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self.has_adapters = False
        """Whether any sequence could use one."""
        self._owner: list[Sequence | None] = [None] * max_num_seqs
        self._admission = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._tables = np.full((max_num_seqs, max_blocks_per_seq), NULL_BLOCK, dtype=np.int32)
        self._prefix_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._rope_shift = np.zeros(max_num_seqs, dtype=np.int64)
        self._updates: list[tuple[int, int, int]] = []

    def build(self, work: Work) -> list[StepBatch]:
        """The steps of a turn, first to last."""
        if work.drafts:
            return [self._verification(work)]
        first = self._first(work)
        counts_B = np.array(work.counts, dtype=np.int64)
        num_steps = work.counts[0] if work.counts else 1
        return [first, *(self._later(first, work, counts_B, step) for step in range(1, num_steps))]

    def _later(self, first: StepBatch, work: Work, counts_B: Int64s, step: int) -> StepBatch:
        """A turn's later step: those that are left are the first rows, one position further each time."""
        num_left = int(np.count_nonzero(counts_B > step))
        return self._single_rows(
            work.decodes[:num_left],
            token_ids_N=np.full(num_left, IN_FLIGHT, dtype=np.int64),
            slots_N=first.slots_B[:num_left],
            index_N=first.context_lens_B[:num_left].astype(np.int64) - 1 + step,
            adapters={name: rows[rows < num_left] for name, rows in first.adapters.items()},
        )

    def _verification(self, work: Work) -> StepBatch:
        """Each sequence's newest token and its draft, a row each."""
        for seq in work.grown:
            self._extend_table(seq)
        seqs = work.decodes
        row_N = np.repeat(np.arange(len(seqs)), work.counts)
        ids = [
            token for seq, draft in zip(seqs, work.drafts, strict=True) for token in (seq.tokens[-1], *draft)
        ]
        index = [at for seq in seqs for at in range(len(seq.tokens) - 1, seq.num_computed)]
        return self._single_rows(
            [seqs[row] for row in row_N],
            token_ids_N=np.array(ids, dtype=np.int64),
            slots_N=np.array([seq.slot for seq in seqs], dtype=np.int32)[row_N],
            index_N=np.array(index, dtype=np.int64),
            adapters=_adapter_rows(seqs, row_N) if self.has_adapters else {},
        )

    def _single_rows(
        self,
        sampled: list[Sequence],
        *,
        token_ids_N: Int64s,
        slots_N: Int32s,
        index_N: Int64s,
        adapters: dict[str, Int64s],
    ) -> StepBatch:
        """A step in which every row has one token, index_N of its sequence, and samples the next."""
        size, num_rows = self.block_size, len(index_N)
        blocks_N = self._tables[slots_N, index_N // size].astype(np.int64)
        updates, self._updates = self._updates, []
        return StepBatch(
            token_ids_N=token_ids_N,
            positions_N=index_N + self._rope_shift[slots_N],
            kv_slots_N=blocks_N * size + index_N % size,
            slots_B=slots_N,
            query_starts_B1=np.arange(num_rows + 1, dtype=np.int32),
            context_lens_B=(index_N + 1).astype(np.int32),
            tables=self._tables,
            prefix_blocks=self._prefix_blocks,
            table_updates=updates,
            block_size=size,
            num_decodes=num_rows,
            sampled=sampled,
            sampled_rows_S=np.arange(num_rows, dtype=np.int64),
            sampled_slots_S=slots_N,
            sampling=self._sampling(slots_N, index_N + 1),
            scored=[],
            adapters=adapters,
        )

    def _first(self, work: Work) -> StepBatch:
        """Sequences with one token come first; the order is otherwise the scheduler's."""
        decodes = work.decodes
        for seq in work.grown:
            self._extend_table(seq)
        for chunk in work.chunks:
            self._seat(chunk.seq)
        longer = [c for c in work.chunks if c.length > 1]
        chunks = [c for c in work.chunks if c.length == 1] + longer
        seqs = decodes + [c.seq for c in chunks]
        begun = slice(len(decodes), len(seqs))  # the rows of chunks
        slots_B = np.array([seq.slot for seq in seqs], dtype=np.int32)
        ends_B = np.array([seq.num_computed for seq in seqs], dtype=np.int64)
        ends_B[: len(decodes)] -= np.array(work.counts, dtype=np.int64) - 1
        lengths_B = np.ones(len(seqs), dtype=np.int64)
        lengths_B[begun] = [c.length for c in chunks]
        query_starts_B1 = np.zeros(len(seqs) + 1, dtype=np.int32)
        np.cumsum(lengths_B, out=query_starts_B1[1:])

        row_N, index_N = np.arange(len(seqs)), ends_B - lengths_B
        if longer:
            row_N = np.repeat(row_N, lengths_B)
            index_N = np.arange(len(row_N)) - query_starts_B1[row_N] + index_N[row_N]
        size = self.block_size
        blocks_N = self._tables[slots_B[row_N], index_N // size].astype(np.int64)
        is_sampled_B = np.ones(len(seqs), dtype=np.bool_)
        if chunks:
            is_sampled_B[begun] = [c.is_last and not c.seq.is_scored for c in chunks]
            shared_B = np.zeros(len(seqs), dtype=np.int64)  # what is generated never lies in a shared block
            shared_B[begun] = [c.seq.num_shared for c in chunks]
            blocks_N[index_N < shared_B[row_N]] = NULL_BLOCK
        sampled = seqs if is_sampled_B.all() else [seqs[i] for i in np.flatnonzero(is_sampled_B)]
        sampled_slots_S = slots_B[is_sampled_B]
        updates, self._updates = self._updates, []
        positions_N = index_N + self._rope_shift[slots_B[row_N]]
        return StepBatch(
            token_ids_N=_token_ids(decodes, ends_B, chunks),
            positions_N=positions_N,
            kv_slots_N=blocks_N * size + index_N % size,
            slots_B=slots_B,
            query_starts_B1=query_starts_B1,
            context_lens_B=ends_B.astype(np.int32),
            tables=self._tables,
            prefix_blocks=self._prefix_blocks,
            table_updates=updates,
            block_size=size,
            num_decodes=len(seqs) - len(longer),
            sampled=sampled,
            sampled_rows_S=query_starts_B1[1:][is_sampled_B].astype(np.int64) - 1,
            sampled_slots_S=sampled_slots_S,
            sampling=self._sampling(
                sampled_slots_S, ends_B[is_sampled_B], sampled if work.has_special else ()
            ),
            scored=[
                _scored_rows(c, int(start))
                for c, start in zip(chunks, query_starts_B1[begun], strict=True)
                if c.seq.is_scored
            ],
            adapters=_adapter_rows(seqs, row_N) if self.has_adapters else {},
            pictures=_picture_rows(chunks, query_starts_B1[begun], positions_N),
        )

    def forget(self) -> None:
        """All block tables are void: the cache has been given back."""
        self._owner = [None] * len(self._owner)

    def _seat(self, seq: Sequence) -> None:
        """Whatever of a sequence's row is not there yet: all of it where the sequence is new in its slot, or back in it
        after a preemption, with other blocks."""
        slot, params = seq.slot, seq.request.sampling
        if self._owner[slot] is not seq or self._admission[slot] != seq.num_preempted:
            self._give_slot(seq, params)
        if self._num_blocks[slot] < len(seq.block_ids):
            self._extend_table(seq)

    def _give_slot(self, seq: Sequence, params: SamplingParams) -> None:
        slot = seq.slot
        self._owner[slot] = seq
        self._admission[slot] = seq.num_preempted
        self._num_blocks[slot] = 0
        self._prefix_blocks[slot] = (seq.num_prompt - seq.request.num_generated) // self.block_size
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = seq.seed
        self._rope_shift[slot] = 0 if seq.rope is None else seq.rope[1]

    def _extend_table(self, seq: Sequence) -> None:
        slot, have, need = seq.slot, self._num_blocks[seq.slot], len(seq.block_ids)
        self._tables[slot, have:need] = seq.block_ids[have:]
        self._updates.append((slot, have, need))
        self._num_blocks[slot] = need

    def _sampling(
        self, slots_S: Int32s, positions_S: Int64s, special: Iterable[Sequence] = ()
    ) -> SamplingBatch:
        """`special`: the rows' sequences, where one of them asks for more than a token."""
        edits, num_top = LogitEdits(), 0
        for row, seq in enumerate(special):
            num_top = max(num_top, seq.request.num_top_logprobs)
            if seq.edits is not None:
                seq.edits.collect(edits, row, int(positions_S[row]) - seq.num_prompt)
        return SamplingBatch(
            temperature_S=self._temperature[slots_S],
            top_k_S=self._top_k[slots_S],
            top_p_S=self._top_p[slots_S],
            min_p_S=self._min_p[slots_S],
            uniform_S=uniforms(self._seeds[slots_S], positions_S),
            edits=edits or None,
            num_top=num_top,
        )


def changed_places(updates: list[tuple[int, int, int]]) -> tuple[Int32s, Int32s]:
    """Row and column of every entry of the block tables that changed, from (row, first column, end column)."""
    rows, begins, ends = np.array(updates, dtype=np.int32).reshape(-1, 3).T
    counts = ends - begins
    before = np.cumsum(counts, dtype=np.int32) - counts
    columns = np.arange(counts.sum(), dtype=np.int32) + np.repeat(begins - before, counts)
    return np.repeat(rows, counts), columns


def _token_ids(decodes: list[Sequence], ends_B: Int64s, chunks: list[Chunk]) -> Int64s:
    ids = [
        tokens[count - 1] if count <= len(tokens := seq.tokens) else IN_FLIGHT
        for seq, count in zip(decodes, ends_B[: len(decodes)].tolist(), strict=True)
    ]
    for chunk in chunks:
        ids += chunk.seq.tokens[chunk.start : chunk.start + chunk.length]
    return np.array(ids, dtype=np.int64)


def _scored_rows(chunk: Chunk, first_row: int) -> ScoredRows:
    seq = chunk.seq
    assert isinstance(seq, ScoredSequence)
    targets = np.array(seq.tokens[chunk.start + 1 : chunk.start + chunk.length + 1], dtype=np.int64)
    rows = np.arange(first_row, first_row + len(targets), dtype=np.int64)
    return ScoredRows(chunk, rows, targets, seq.temperature, first_row + chunk.length - 1, seq.is_embedding)


def _picture_rows(chunks: list[Chunk], first_rows: Int32s, positions_N: Int64s) -> PictureRows | None:
    """None where no prompt in the batch has pictures."""
    if all(chunk.seq.rope is None for chunk in chunks):
        return None
    spans: list[PictureSpan] = []
    positions_3N = np.broadcast_to(positions_N, (3, len(positions_N))).copy()
    for chunk, row in zip(chunks, first_rows.tolist(), strict=True):
        if chunk.seq.rope is None:
            continue
        end = chunk.start + chunk.length
        known = chunk.seq.rope[0][:, chunk.start : end]
        positions_3N[:, row : row + known.shape[1]] = known
        for picture in chunk.seq.request.pictures:
            first, last = max(picture.start, chunk.start), min(picture.end, end)
            if first < last:
                at = first - picture.start
                spans.append(PictureSpan(picture, row + first - chunk.start, at, last - first))
    return PictureRows(spans, positions_3N)


def _adapter_rows(seqs: list[Sequence], row_N: Int64s) -> dict[str, Int64s]:
    names = [seq.request.adapter for seq in seqs]
    return {
        name: np.flatnonzero(np.isin(row_N, [i for i, other in enumerate(names) if other == name]))
        for name in dict.fromkeys(names)
        if name is not None
    }
