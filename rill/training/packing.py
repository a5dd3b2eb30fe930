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
    units: list[list[int]] = []
    costs: list[int] = []
    for members in _families(sequences):
        prefix = _shared_prefix([sequences[i] for i in members])
        for index in members:
            num_tokens = sequences[index].num_tokens
            if index == members[0] or costs[-1] + num_tokens - prefix > budget:
                units.append([index])
                costs.append(num_tokens)
            else:
                units[-1].append(index)
                costs[-1] += num_tokens - prefix
    return plan_units(units, costs, budget, at_least=at_least)


def plan_units(
    units: Sequence[Sequence[int]], costs: Sequence[int], budget: int, *, at_least: int = 1
) -> list[list[int]]:
    """plan_micro_batches for indices that stay together."""
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
    pieces, owned = _lay_out(sequences, share_prefixes=share_prefixes)
    num_row_tokens = pieces[-1].stop
    rank, size, group = context or (0, 1, None)
    missing = -num_row_tokens % (size * pad_to_multiple)
    if missing:
        nothing = np.zeros(missing, np.int32)
        padding = PackSequence(token_ids=nothing, wanted=nothing.astype(np.bool_))
        pieces.append(_Piece(padding, 0, missing, num_row_tokens))
    tokens = np.concatenate([p.sequence.token_ids[p.first : p.end] for p in pieces])
    positions = np.concatenate([np.arange(p.first, p.end) for p in pieces])
    segments = [piece.segment for piece in pieces]
    wanted = [np.flatnonzero(sequence.wanted) for sequence in sequences]
    source = np.concatenate([piece.predictors(w) for piece, w in zip(owned, wanted, strict=True)])
    target = np.concatenate([s.token_ids[w] for s, w in zip(sequences, wanted, strict=True)])
    seq = np.repeat(np.arange(len(sequences)), [len(w) for w in wanted])
    last = np.array([piece.stop - 1 for piece in owned])
    experts, pictures = _experts(pieces), _pictures(pieces)
    lo, hi, context_slice = 0, len(tokens), None
    if context is not None:
        if pictures is not None:
            raise InvalidSampleError(
                "samples with pictures cannot be cut over ranks: set context_parallel = 1"
            )
        lo, hi = rank * len(tokens) // size, (rank + 1) * len(tokens) // size
        mine = np.flatnonzero((source >= lo) & (source < hi))
        context_slice = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0)
        source, target = source[mine] - lo, target[mine]
        segments = _cut_segments(segments, lo, hi)
    columns = (tokens[lo:hi], positions[lo:hi], source, target, last, seq)
    ids_M, positions_M, source_K, target_K, last_S, seq_K = _copied(columns, device)
    return Pack(
        input_ids_1M=ids_M[None],
        position_ids_1M=positions_M[None],
        layout=build_layout(segments, device=device, use_flash=use_flash, context_group=group),
        source_K=source_K,
        target_K=target_K,
        last_S=last_S,
        seq_K=seq_K,
        num_seqs=len(sequences),
        num_row_tokens=num_row_tokens,
        num_sequence_tokens=sum(s.num_tokens for s in sequences),
        context_slice=context_slice,
        routed_experts_MLK=None if experts is None else copy_in(experts[lo:hi], device),
        pictures=pictures,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, end) of a sequence, from `start` on in the row; those before `first` lie in the `prefix`."""

    sequence: PackSequence
    first: int
    end: int
    start: int
    prefix: _Piece | None = None

    @property
    def stop(self) -> int:
        return self.start + self.end - self.first

    @property
    def segment(self) -> Segment:
        prefix = (self.prefix.start, self.prefix.stop) if self.prefix else (0, 0)
        return Segment(start=self.start, end=self.stop, prefix_start=prefix[0], prefix_end=prefix[1])

    def predictors(self, wanted: Indices) -> Indices:
        """Where in the row the tokens lie that predict the wanted ones of the sequence."""
        before = wanted - self.first + self.start - 1
        # The first own token is predicted by the last token of the shared prefix, wherever that lies.
        return before if self.prefix is None else np.where(wanted == self.first, self.prefix.stop - 1, before)


def _lay_out(sequences: Sequence[PackSequence], *, share_prefixes: bool) -> tuple[list[_Piece], list[_Piece]]:
    """(the pieces of the row, each sequence's own): a shared prefix lies before the first sequence that has it."""
    families = {m[0]: m for m in _families(sequences)} if share_prefixes else {}
    pieces: list[_Piece] = []
    owned: list[_Piece] = []
    prefix_of: dict[int, _Piece] = {}
    for index, sequence in enumerate(sequences):
        members = families.get(index, [])
        if length := _shared_prefix([sequences[i] for i in members]):
            pieces.append(_Piece(sequence, 0, length, pieces[-1].stop if pieces else 0))
            prefix_of |= dict.fromkeys(members, pieces[-1])
        prefix, start = prefix_of.get(index), pieces[-1].stop if pieces else 0
        owned.append(_Piece(sequence, prefix.end if prefix else 0, sequence.num_tokens, start, prefix))
        pieces.append(owned[-1])
    return pieces, owned


def _pictures(pieces: Sequence[_Piece]) -> PictureRows | None:
    """What the row's placeholders stand for, and where all tokens stand."""
    spans = [
        PictureSpan(picture, p.start + picture.start - p.first, 0, picture.num_tokens)
        for p in pieces
        for picture in p.sequence.pictures
        if p.first <= picture.start < p.end
    ]
    if not spans:
        return None
    parts = [
        rope_positions(p.sequence.num_tokens, p.sequence.pictures)[0][:, p.first : p.end] for p in pieces
    ]
    return PictureRows(spans, np.concatenate(parts, axis=1))


def _experts(pieces: Sequence[_Piece]) -> npt.NDArray[np.int16] | None:
    """[M, L, K] along the row, -1 where nothing was recorded; None where nothing was at all."""
    recorded = [(p, p.sequence.routed_experts) for p in pieces]
    shape = next((experts.shape[1:] for _, experts in recorded if experts is not None), None)
    if shape is None:
        return None
    whole = np.full((pieces[-1].stop, *shape), -1, dtype=np.int16)
    for piece, experts in recorded:
        if experts is not None:
            whole[piece.start : piece.stop] = experts[piece.first : piece.end]
    return whole


def _copied(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Each as int64 on the device, brought there in one piece: a copy costs the host more than its bytes."""
    flat = copy_in(np.concatenate(arrays).astype(np.int64), device)
    return torch.split(flat, [len(array) for array in arrays])


def _cut_segments(segments: list[Segment], lo: int, hi: int) -> list[Segment]:
    """The parts of plain segments inside [lo, hi); what lies before the cut becomes the prefix."""
    parts: list[Segment] = []
    for s in segments:
        start, end = max(s.start, lo), min(s.end, hi)
        if start < end:
            assert s.prefix_length == 0, "prefix sharing and context parallelism exclude each other"
            parts.append(Segment(start=start, end=end, prefix_start=s.start, prefix_end=start))
    return parts


def _families(sequences: Sequence[PackSequence]) -> list[list[int]]:
    """The indices of those that may share a prefix; one without a key is by itself."""
    found: dict[object, list[int]] = {}
    for index, sequence in enumerate(sequences):
        key = index if sequence.share_key is None else sequence.share_key
        found.setdefault(key, []).append(index)
    return list(found.values())


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
