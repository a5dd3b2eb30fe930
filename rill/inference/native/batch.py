"""Turns the scheduler's work into the flat arrays that the steps of a turn compute on.

What stays the same from step to step for a running sequence (its block table, its sampling parameters) lives in
tables with one row per slot, so that a step of pure generation is built by a few NumPy operations however many
sequences take part. The later steps of a turn differ from the first by their positions, and by who is left. A step that
looks at drafts is a step of pure generation too: every drafted token is a row of its own, and sees those before it
because a layer writes all keys and values before it reads any.

Axes: N token of the flat batch, B sequence, S sampled row, M block-table column.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from rill.inference.native.block_manager import NULL_BLOCK
from rill.inference.native.logit_edits import LogitEdits
from rill.inference.native.sampler import SamplingBatch, uniforms
from rill.inference.native.scheduler import Chunk, Work
from rill.inference.native.sequence import Sequence
from rill.models.vision import PictureRows, PictureSpan

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

IN_FLIGHT = -1
"""Stands for a token that the step before samples: the device fills it in."""


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
    num_running: int
    """Sequences in the middle of generation: the first ones, a row each."""
    num_decodes: int
    """Sequences with one new token, those and prompts' last."""
    sampled: list[Sequence]
    sampled_rows_S: Int64s
    """Index into N of each sampled sequence's newest token."""
    sampled_slots_S: Int32s
    sampling: SamplingBatch
    block_size: int
    adapters: dict[str, Int64s]
    """Rows of the flat batch by adapter; empty when all use the base model."""
    scored: list[tuple[Chunk, int]] = field(default_factory=list)
    """Those of ScoredSequences, with the index into N of their first token."""
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
        return self.tables[self.slots_B, : -(-int(self.context_lens_B.max()) // self.block_size)]

    @property
    def is_decode_only(self) -> bool:
        """Every sequence has one new token, and samples the next."""
        return self.pictures is None and self.num_decodes == len(self.sampled_rows_S) == self.num_seqs

    def running(self) -> StepBatch:
        """The part of it that goes on with generation."""
        count = self.num_running
        return replace(
            self,
            token_ids_N=self.token_ids_N[:count],
            positions_N=self.positions_N[:count],
            kv_slots_N=self.kv_slots_N[:count],
            slots_B=self.slots_B[:count],
            query_starts_B1=self.query_starts_B1[: count + 1],
            context_lens_B=self.context_lens_B[:count],
            num_decodes=count,
            sampled=self.sampled[:count],
            sampled_rows_S=self.sampled_rows_S[:count],
            sampled_slots_S=self.sampled_slots_S[:count],
            sampling=self.sampling.rows(slice(count)),
            scored=[],
        )


class BatchBuilder:
    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self.has_adapters = False
        """Whether any sequence could use one."""
        self._seated: list[tuple[int, int] | None] = [None] * max_num_seqs
        """Whose row it is (its arrival), and how often that had been preempted when it came."""
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
        for seq in work.grown:
            self._extend_table(seq)
        if work.drafts:
            return [self._verification(work)]
        first = self._first(work)
        counts_B = np.array(work.counts, dtype=np.int64)
        num_steps = work.counts[0] if work.counts else 1
        return [first, *(self._later(first, work, counts_B, step) for step in range(1, num_steps))]

    def _first(self, work: Work) -> StepBatch:
        """Sequences with one token come first; the order is otherwise the scheduler's."""
        decodes, chunks = work.decodes, sorted(work.chunks, key=lambda chunk: chunk.length > 1)
        for chunk in chunks:
            self.seat(chunk.seq)
        seqs = decodes + [c.seq for c in chunks]
        slots_B = np.array([seq.slot for seq in seqs], dtype=np.int32)
        ends_B = np.array([seq.num_computed for seq in seqs], dtype=np.int64)
        ends_B[: len(decodes)] -= np.array(work.counts, dtype=np.int64) - 1
        step = self._step(seqs, _token_ids(decodes, ends_B, chunks), slots_B, ends_B, work, chunks)
        firsts = step.query_starts_B1[len(decodes) : -1]
        step.scored = [(c, row) for c, row in zip(chunks, firsts.tolist(), strict=True) if c.seq.is_scored]
        step.pictures = _picture_rows(chunks, firsts, step.positions_N)
        return step

    def _later(self, first: StepBatch, work: Work, counts_B: Int64s, step: int) -> StepBatch:
        """A turn's later step: those that are left are the first rows, one position further each time."""
        left = slice(int(np.count_nonzero(counts_B > step)))
        ends_B = first.context_lens_B[left].astype(np.int64) + step
        ids_N = np.full(len(ends_B), IN_FLIGHT, dtype=np.int64)
        adapters = {name: rows[rows < len(ends_B)] for name, rows in first.adapters.items()}
        return self._step(work.decodes[left], ids_N, first.slots_B[left], ends_B, work, adapters=adapters)

    def _verification(self, work: Work) -> StepBatch:
        """Each sequence's newest token and its draft, a row each."""
        drafts = zip(work.decodes, work.drafts, strict=True)
        ids = [token for seq, draft in drafts for token in (seq.tokens[-1], *draft)]
        ends = [end for seq in work.decodes for end in range(len(seq.tokens), seq.num_computed + 1)]
        seqs = [seq for seq, count in zip(work.decodes, work.counts, strict=True) for _ in range(count)]
        slots_B = np.array([seq.slot for seq in seqs], dtype=np.int32)
        ids_N, ends_B = np.array(ids, dtype=np.int64), np.array(ends, dtype=np.int64)
        return self._step(seqs, ids_N, slots_B, ends_B, work)

    def _step(
        self,
        seqs: list[Sequence],
        token_ids_N: Int64s,
        slots_B: Int32s,
        ends_B: Int64s,
        work: Work,
        chunks: Sequence_[Chunk] = (),
        adapters: dict[str, Int64s] | None = None,
    ) -> StepBatch:
        """Each row computes the last of its sequence's first ends_B tokens; the last rows, chunks that end there."""
        size, rows_B, begun = self.block_size, np.arange(len(seqs)), slice(len(seqs) - len(chunks), None)
        query_starts_B1 = np.arange(len(seqs) + 1, dtype=np.int32)
        row_N, index_N = rows_B, ends_B - 1
        if chunks:
            lengths_B = np.ones_like(ends_B)
            lengths_B[begun] = [c.length for c in chunks]
            np.cumsum(lengths_B, out=query_starts_B1[1:])
            row_N = np.repeat(rows_B, lengths_B)
            index_N = np.arange(len(row_N)) + np.repeat(ends_B - query_starts_B1[1:], lengths_B)
        slots_N, columns_N = slots_B[row_N], index_N // size
        blocks_N = self._tables[slots_N, columns_N].astype(np.int64)
        sampled, rows_S = seqs, rows_B
        if chunks:
            shared_B = np.zeros_like(ends_B)  # what is generated never lies in a shared block
            shared_B[begun] = [c.seq.num_shared for c in chunks]
            blocks_N[index_N < shared_B[row_N]] = NULL_BLOCK
            is_sampled_B = np.ones(len(seqs), dtype=np.bool_)
            is_sampled_B[begun] = [c.is_last and not c.seq.is_scored for c in chunks]
            rows_S = np.flatnonzero(is_sampled_B)
            sampled = [seqs[row] for row in rows_S]
        updates, self._updates = self._updates, []
        return StepBatch(
            token_ids_N=token_ids_N,
            positions_N=index_N + self._rope_shift[slots_N],
            kv_slots_N=(blocks_N - columns_N) * size + index_N,
            slots_B=slots_B,
            query_starts_B1=query_starts_B1,
            context_lens_B=ends_B.astype(np.int32),
            tables=self._tables,
            prefix_blocks=self._prefix_blocks,
            table_updates=updates,
            block_size=size,
            num_running=len(seqs) - len(chunks),
            num_decodes=len(seqs) - sum(chunk.length > 1 for chunk in chunks),
            sampled=sampled,
            sampled_rows_S=query_starts_B1[1:][rows_S].astype(np.int64) - 1,
            sampled_slots_S=slots_B[rows_S],
            sampling=self._sampling(slots_B[rows_S], ends_B[rows_S], sampled if work.has_special else ()),
            adapters=self._adapter_rows(seqs, row_N) if adapters is None else adapters,
        )

    def forget(self) -> None:
        """All block tables are void: the cache has been given back."""
        self._seated = [None] * len(self._seated)

    def seat(self, seq: Sequence) -> None:
        """Whatever of a sequence's row is not there yet: all of it where the sequence is new in its slot, or back in it
        after a preemption, with other blocks."""
        slot, params = seq.slot, seq.request.sampling
        if self._seated[slot] != (seq.arrival, seq.num_preempted):
            self._seated[slot] = (seq.arrival, seq.num_preempted)
            self._num_blocks[slot] = 0
            self._prefix_blocks[slot] = (seq.num_prompt - seq.request.num_generated) // self.block_size
            self._temperature[slot] = params.temperature
            self._top_k[slot] = params.top_k
            self._top_p[slot] = params.top_p
            self._min_p[slot] = params.min_p
            self._seeds[slot] = seq.seed
            self._rope_shift[slot] = 0 if seq.rope is None else seq.rope[1]
        if self._num_blocks[slot] < len(seq.block_ids):
            self._extend_table(seq)

    def _extend_table(self, seq: Sequence) -> None:
        slot, have, need = seq.slot, self._num_blocks[seq.slot], len(seq.block_ids)
        self._tables[slot, have:need] = seq.block_ids[have:]
        self._updates.append((slot, have, need))
        self._num_blocks[slot] = need

    def _adapter_rows(self, seqs: list[Sequence], row_N: Int64s) -> dict[str, Int64s]:
        names = [seq.request.adapter for seq in seqs] if self.has_adapters else []
        return {
            name: np.flatnonzero(np.isin(row_N, [i for i, other in enumerate(names) if other == name]))
            for name in dict.fromkeys(names)
            if name is not None
        }

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
    newest = [
        tokens[count - 1] if count <= len(tokens := seq.tokens) else IN_FLIGHT
        for seq, count in zip(decodes, ends_B[: len(decodes)].tolist(), strict=True)
    ]
    ids = array("i", newest)
    for chunk in chunks:
        ids += chunk.seq.tokens[chunk.start : chunk.start + chunk.length]
    return np.array(ids, dtype=np.int64)


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
