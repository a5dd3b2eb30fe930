"""From sequences to packs: what one forward pass of the trainer sees.

Callers: the trainers of this room. A pack is one row of tokens with position resets (see
rill.models.train.packed_layout) plus, for every token whose log-probability is wanted, the hidden state that predicts
it. Guarantees, held by tests: no token attends across a boundary, and neither the way sequences are dealt into
packs nor sharing a prefix changes a gradient.

    plan_micro_batches   sequences → bins of at most `budget` tokens, few and even
    build_pack           one bin → Pack, with shared prefixes computed once if asked

Prefix sharing looks at the tokens themselves: sequences of one `share_key` (a group id) that begin with the same
tokens, up to the first token that any of them trains on, store that stretch once. Every sequence keeps at least one
token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rill.errors import InvalidSampleError
from rill.models.pictures import rope_positions
from rill.models.train.packed_layout import PackedLayout, Segment, build_layout, copy_in
from rill.models.vision import PictureRows, PictureSpan
from rill.types import Bits, Picture, TokenIds

Indices = npt.NDArray[np.int64]


class Masked(Protocol):
    """A sequence some of whose tokens are trained on: a trajectory, an example, an answer."""

    @property
    def token_ids(self) -> TokenIds: ...

    @property
    def loss_mask(self) -> Bits: ...

    @property
    def pictures(self) -> tuple[Picture, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSequence:
    """One sequence to be packed."""

    token_ids: TokenIds
    wanted: Bits
    """True where the token's log-probability (or value) is wanted. Position 0 has no predecessor: never."""
    share_key: str | None = None
    """Sequences of one key may share a prefix; None shares with nobody."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[T, L, K] that the engine chose, for routing replay (rill.models.routing); -1: the router's own."""
    pictures: tuple[Picture, ...] = ()

    @staticmethod
    def of(
        source: Masked,
        share_key: str | None = None,
        *,
        every_token: bool = False,
        routed_experts: npt.NDArray[np.int16] | None = None,
    ) -> PackSequence:
        """Its trained tokens are wanted, or every token."""
        mask = np.ones(len(source.token_ids), np.bool_) if every_token else source.loss_mask
        return PackSequence(
            token_ids=source.token_ids,
            wanted=predicted(mask),
            share_key=share_key,
            routed_experts=routed_experts,
            pictures=source.pictures,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def predicted(mask: Bits) -> Bits:
    """A mask without position 0, which nothing predicts."""
    mask = mask.copy()
    mask[:1] = False
    return mask


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One row of M tokens; K of them are wanted, in the order of the sequences and of their tokens."""

    input_ids_1M: Tensor
    position_ids_1M: Tensor
    layout: PackedLayout
    source_K: Tensor
    """int64: the hidden state of this rank's slice that predicts each wanted token; its value is read there too."""
    target_K: Tensor
    """int64: the wanted token's id."""
    last_S: Tensor
    """int64: row position of every sequence's last token (sequence scores are read there)."""
    seq_K: Tensor
    """int64: the wanted token's sequence in this pack."""
    num_seqs: int
    num_row_tokens: int
    """Tokens computed; less than num_sequence_tokens when prefixes are shared."""
    num_sequence_tokens: int
    routed_experts_MLK: Tensor | None = None
    """int16: choices to replay; None: the routers' own."""
    pictures: PictureRows | None = None
    """Where there are some: what placeholders stand for, and where all tokens stand in place of position_ids_1M."""
    context_slice: tuple[int, int] | None = None
    """[start, end) of `*_K` held by this rank under context parallelism; None: all of it."""


def plan_micro_batches(lengths: Sequence[int], budget: int, *, at_least: int = 1) -> list[list[int]]:
    """Indices of sequences per micro-batch: every bin within `budget`, few and even bins, but `at_least` so many.

    Longest first into the emptiest of n bins, n growing from the lower bound until all fit. Deterministic. Fewer than
    `at_least` come out only where there are fewer sequences.
    """
    if not lengths:
        return []
    longest = max(lengths)
    if longest > budget:
        raise InvalidSampleError(
            f"a sequence of {longest} tokens does not fit micro_batch_tokens = {budget}: raise it, or cut sequences"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_bins = max(at_least, -(-sum(lengths) // budget))
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = np.zeros(num_bins, dtype=np.int64)
        for index in order:
            target = int(loads.argmin())
            if loads[target] + lengths[index] > budget:
                break
            bins[target].append(index)
            loads[target] += lengths[index]
        else:
            # The longest sequences are in the first bins, as they are on other ranks.
            return [sorted(b) for b in bins if b]
        num_bins += 1


def plan_sharing_micro_batches(
    sequences: Sequence[PackSequence], budget: int, *, at_least: int = 1
) -> list[list[int]]:
    """plan_micro_batches, keeping sequences that share a prefix together while they fit the budget."""
    families: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        families.setdefault(
            sequence.share_key if sequence.share_key is not None else f"\0{index}", []
        ).append(index)
    units: list[list[int]] = []
    costs: list[int] = []
    for members in families.values():
        prefix = _shared_prefix([sequences[i] for i in members])
        unit: list[int] = []
        cost = 0
        for index in members:
            extra = sequences[index].num_tokens - (prefix if unit else 0)
            if unit and cost + extra > budget:
                units.append(unit)
                costs.append(cost)
                unit, cost, extra = [], 0, sequences[index].num_tokens
            unit.append(index)
            cost += extra
        units.append(unit)
        costs.append(cost)
    planned = plan_micro_batches(costs, budget, at_least=at_least)
    return [sorted(i for u in bin_ for i in units[u]) for bin_ in planned]


def build_pack(
    sequences: Sequence[PackSequence],
    *,
    device: torch.device,
    use_flash: bool,
    share_prefixes: bool = False,
    context: tuple[int, int, object] | None = None,
    pad_to_multiple: int = 1,
) -> Pack:
    """`context` is (rank, size, process group) of context parallelism: the pack is then this rank's slice.

    `pad_to_multiple` lengthens the row by tokens nobody reads: matrix units like whole tiles.
    """
    row = _Row()
    by_key: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if share_prefixes and sequence.share_key is not None:
            by_key.setdefault(sequence.share_key, []).append(index)
    prefix_of: dict[int, tuple[int, int]] = {}
    families = {m[0]: m for m in by_key.values() if len(m) > 1}
    for index, sequence in enumerate(sequences):
        if index in families:
            members = families[index]
            length = _shared_prefix([sequences[i] for i in members])
            if length:
                start = row.add(sequence, 0, length, None)
                prefix_of.update({i: (start, start + length) for i in members})
        row.add_sequence(sequence, prefix_of.get(index))
    num_tokens = sum(s.num_tokens for s in sequences)
    return row.finish(len(sequences), device, use_flash, context, num_tokens, pad_to_multiple)


class _Row:
    """Collects the pieces of a pack."""

    def __init__(self) -> None:
        self.tokens: list[TokenIds] = []
        self.positions: list[Indices] = []
        self.segments: list[Segment] = []
        self.source: list[Indices] = []
        self.target: list[TokenIds] = []
        self.last: list[int] = []
        self.seq: list[Indices] = []
        self.experts: list[npt.NDArray[np.int16] | None] = []
        self.spans: list[PictureSpan] = []
        self.pieces: list[tuple[PackSequence, int, int]] = []
        self.length = 0
        self.num_added = 0

    def add(self, sequence: PackSequence, first: int, end: int, prefix: tuple[int, int] | None) -> int:
        """Its tokens [first, end); where they begin in the row."""
        start, experts = self.length, sequence.routed_experts
        self.experts.append(None if experts is None else experts[first:end])
        self.length += end - first
        self.tokens.append(sequence.token_ids[first:end])
        self.positions.append(np.arange(first, end))
        self.pieces.append((sequence, first, end))
        self.spans += [
            PictureSpan(p, start + p.start - first, 0, p.num_tokens)
            for p in sequence.pictures
            if first <= p.start < end
        ]
        prefix_start, prefix_end = prefix or (0, 0)
        self.segments.append(
            Segment(start=start, end=self.length, prefix_start=prefix_start, prefix_end=prefix_end)
        )
        return start

    def add_sequence(self, sequence: PackSequence, prefix: tuple[int, int] | None) -> None:
        shared = prefix[1] - prefix[0] if prefix else 0
        start = self.add(sequence, shared, sequence.num_tokens, prefix)
        wanted = np.flatnonzero(sequence.wanted)
        own = wanted - shared + start
        # The first own token is predicted by the last token of the shared prefix, wherever that lies.
        source = np.where(wanted == shared, prefix[1] - 1 if prefix else -1, own - 1)
        self.source.append(source)
        self.last.append(self.length - 1)
        self.target.append(sequence.token_ids[wanted])
        self.seq.append(np.full(len(wanted), self.num_added))
        self.num_added += 1

    def finish(
        self,
        num_seqs: int,
        device: torch.device,
        use_flash: bool,
        context: tuple[int, int, object] | None,
        num_sequence_tokens: int,
        pad_to_multiple: int,
    ) -> Pack:
        tokens, positions = np.concatenate(self.tokens), np.concatenate(self.positions)
        source, target = np.concatenate(self.source), np.concatenate(self.target)
        seq = np.concatenate(self.seq)
        segments, num_row_tokens = self.segments, self.length
        context_slice = group = None
        rank, size, group = context if context is not None else (0, 1, None)
        if self.spans and context is not None:
            raise InvalidSampleError(
                "samples with pictures cannot be cut over ranks: set context_parallel = 1"
            )
        tokens, positions, segments = _pad_row(tokens, positions, segments, size * pad_to_multiple)
        if context is not None:
            width = len(tokens) // size
            lo, hi = rank * width, (rank + 1) * width
            mine = np.flatnonzero((source >= lo) & (source < hi))
            context_slice = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0)
            source, target = source[mine] - lo, target[mine]
            tokens, positions = tokens[lo:hi], positions[lo:hi]
            segments = _cut_segments(segments, lo, hi)
        lo, hi = (rank * len(tokens), (rank + 1) * len(tokens)) if context is not None else (0, len(tokens))
        experts = _joined_experts(self.experts, self.tokens, hi)

        ids_M, positions_M, source_K, target_K, last_S, seq_K = _copied(
            (tokens, positions, source, target, np.array(self.last), seq), device
        )
        return Pack(
            input_ids_1M=ids_M[None],
            position_ids_1M=positions_M[None],
            layout=build_layout(segments, device=device, use_flash=use_flash, context_group=group),
            source_K=source_K,
            target_K=target_K,
            last_S=last_S,
            seq_K=seq_K,
            num_seqs=num_seqs,
            num_row_tokens=num_row_tokens,
            num_sequence_tokens=num_sequence_tokens,
            context_slice=context_slice,
            routed_experts_MLK=None if experts is None else copy_in(experts[lo:hi], device),
            pictures=self._pictures(positions) if self.spans else None,
        )

    def _pictures(self, positions: Indices) -> PictureRows:
        """Padding stands where `positions` say."""
        positions_3M = np.broadcast_to(positions, (3, len(positions))).copy()
        parts = [rope_positions(s.num_tokens, s.pictures)[0][:, first:end] for s, first, end in self.pieces]
        positions_3M[:, : self.length] = np.concatenate(parts, axis=1)
        return PictureRows(self.spans, positions_3M)


def _joined_experts(
    parts: Sequence[npt.NDArray[np.int16] | None], tokens: Sequence[TokenIds], length: int
) -> npt.NDArray[np.int16] | None:
    """[length, L, K] along the row, -1 where nothing was recorded; None where nothing was at all."""
    shape = next((part.shape[1:] for part in parts if part is not None), None)
    if shape is None:
        return None
    whole = np.full((max(length, sum(len(t) for t in tokens)), *shape), -1, dtype=np.int16)
    start = 0
    for part, its_tokens in zip(parts, tokens, strict=True):
        if part is not None:
            whole[start : start + len(part)] = part
        start += len(its_tokens)
    return whole


def _copied(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Each as int64 on the device, brought there in one piece: a copy costs the host more than its bytes."""
    flat = copy_in(np.concatenate(arrays).astype(np.int64), device)
    return torch.split(flat, [len(array) for array in arrays])


def _pad_row(
    tokens: TokenIds, positions: Indices, segments: list[Segment], multiple: int
) -> tuple[TokenIds, Indices, list[Segment]]:
    """A row whose length divides by `multiple`; the padding is a segment of its own."""
    missing = -len(tokens) % multiple
    if not missing:
        return tokens, positions, segments
    end = len(tokens)
    return (
        np.concatenate([tokens, np.zeros(missing, dtype=tokens.dtype)]),
        np.concatenate([positions, np.arange(missing)]),
        [*segments, Segment(start=end, end=end + missing)],
    )


def _cut_segments(segments: list[Segment], lo: int, hi: int) -> list[Segment]:
    """The parts of plain segments inside [lo, hi); what lies before the cut becomes the prefix."""
    parts: list[Segment] = []
    for s in segments:
        start, end = max(s.start, lo), min(s.end, hi)
        if start < end:
            assert s.prefix_length == 0, "prefix sharing and context parallelism exclude each other"
            parts.append(Segment(start=start, end=end, prefix_start=s.start, prefix_end=start))
    return parts


def _shared_prefix(members: Sequence[PackSequence]) -> int:
    """Tokens that all members begin with, before any wanted token; 0 when nothing is to be gained. Placeholders are
    the same where they stand for the same picture, and no picture is cut."""
    if len(members) < 2:
        return 0
    limit = min(_first_wanted(m) for m in members)
    first = members[0].token_ids
    shared = set.intersection(*({(p.key, p.start) for p in m.pictures} for m in members))
    for member in members:
        differs = np.flatnonzero(first[:limit] != member.token_ids[:limit])
        if differs.size:
            limit = int(differs[0])
        for picture in member.pictures:
            if picture.start < limit and ((picture.key, picture.start) not in shared or picture.end > limit):
                limit = picture.start
    return limit


def _first_wanted(sequence: PackSequence) -> int:
    wanted = np.flatnonzero(sequence.wanted)
    return min(int(wanted[0]) if wanted.size else sequence.num_tokens, sequence.num_tokens - 1)
