"""What a pack is: which tokens of a row see which others, laid out for every route of attention.

Callers: rill.training.packing builds one per pack; rill.models.train.attention_packed reads it.

A pack is a row of M tokens made of segments. A segment's tokens attend causally to themselves and, if it has one,
to the whole of one earlier stretch, its prefix. A plain sequence is a segment without prefix; with prefix-tree
packing the shared prompt of a group is one segment and every answer a segment with that prompt as prefix:

    row        | prompt A | answer A0 | answer A1 | sequence B     |
    segment 0  [0 ─────── 5)
    segment 1  prefix [0,5) + [5 ──── 9)
    segment 2  prefix [0,5) +            [9 ──── 14)
    segment 3                                      [14 ────────── 20)

S segment, b segment of a padded group, q its query, k its key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAX_PADDING = 1.25
"""A padded batch may hold this many times its real tokens: fewer, larger calls beat tight ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, end) of the row, which also see the tokens [prefix_start, prefix_end) before them."""

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def prefix_length(self) -> int:
        return self.prefix_end - self.prefix_start


@dataclass(frozen=True, kw_only=True)
class PaddedGroup:
    """Segments computed in one padded call. `keys` is None where queries and keys are the same tokens."""

    queries: Tensor
    """int64 [b, q]: row positions; padding repeats the segment's first token."""
    keys: Tensor | None
    """int64 [b, k]: prefix positions, then own positions."""
    mask: Tensor | None
    """bool [b, 1, q, k]: None means plain causal."""
    contiguous: int | None
    """Row start where the group is one run of equal lengths without padding: then it is a view, not a gather."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Everything attention needs to know of one pack; built once, used by every layer."""

    cu_queries: Tensor
    """int32 [S + 1], cumulative query lengths."""
    cu_keys: Tensor
    """int32 [S + 1], cumulative key lengths (prefix + own)."""
    max_queries: int
    """Longest query segment, rounded up to a power of two so that compiled code sees few values."""
    max_keys: int
    key_index: Tensor | None
    """int64, keys of all segments in order; None where they are the row itself."""
    query_tiles: Tensor | None = None
    key_tiles: Tensor | None = None
    """Work lists of rill.models.ops.triton_segments; None where it cannot run."""
    groups: tuple[PaddedGroup, ...] = ()
    places: Tensor | None = None
    """int64: where each query's output lies among those of all groups; None: in its own place."""
    context_group: Any = None
    """Process group over which the row is cut, or None."""


def build_layout(
    segments: Sequence[Segment], *, device: torch.device, use_flash: bool, context_group: Any = None
) -> PackedLayout:
    """`segments` are in row order, cover this rank's queries without gaps, and count from the row's start.

    Under context parallelism `start` of the first segment is this rank's offset, and prefixes name tokens of the
    whole row: a sequence cut in two is a segment whose prefix is its part on earlier ranks.
    """
    query_lengths = [s.length for s in segments]
    key_lengths = [s.prefix_length + s.length for s in segments]
    needs_index = context_group is not None or any(s.prefix_length for s in segments)
    key_index = None
    if needs_index and use_flash:
        spans = [range(a, b) for s in segments for a, b in ((s.prefix_start, s.prefix_end), (s.start, s.end))]
        key_index = copy_in(np.concatenate([np.arange(r.start, r.stop) for r in spans]), device)
    offset = segments[0].start
    query_tiles = key_tiles = None
    if use_flash and _has_segment_kernels(device):
        from rill.models.ops.triton_segments import plan_tiles

        query_tiles, key_tiles = (copy_in(t, device) for t in plan_tiles(query_lengths, key_lengths))
    groups: tuple[PaddedGroup, ...] = ()
    places = None
    if not use_flash:
        alike = _alike(segments)
        groups = tuple(_padded_group(group, offset, device) for group in alike)
        if len(groups) > 1 or groups[0].contiguous is None:
            places = copy_in(_places(alike, offset), device)
    ends = np.cumsum([[0, *query_lengths], [0, *key_lengths]], axis=1).astype(np.int32)
    cu_queries, cu_keys = copy_in(ends, device)
    return PackedLayout(
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=_next_power_of_two(max(query_lengths)),
        max_keys=_next_power_of_two(max(key_lengths)),
        key_index=key_index,
        query_tiles=query_tiles,
        key_tiles=key_tiles,
        groups=groups,
        places=places,
        context_group=context_group,
    )


@functools.cache
def _has_segment_kernels(device: torch.device) -> bool:
    """rill.models.ops.triton_segments is built for Hopper's copy engine and the size of its shared memory."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device)[0] == 9


def copy_in(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A device copy that does not wait: from pageable memory CUDA would first finish all work already queued."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def can_use_flash(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """The segments, sorted by shape and cut where padding would exceed _MAX_PADDING. Order within equal shapes is row
    order, so a row of equal lengths stays one contiguous view."""
    order = sorted(segments, key=lambda s: (s.prefix_length > 0, s.prefix_length, -s.length, s.start))
    groups: list[list[Segment]] = []
    real = longest = longest_prefix = 0
    for segment in order:
        area = segment.length * (segment.prefix_length + segment.length)
        if groups and (segment.prefix_length > 0) == (groups[-1][0].prefix_length > 0):
            q, p = max(longest, segment.length), max(longest_prefix, segment.prefix_length)
            if q * (p + q) * (len(groups[-1]) + 1) <= _MAX_PADDING * (real + area):
                groups[-1].append(segment)
                real, longest, longest_prefix = real + area, q, p
                continue
        groups.append([segment])
        real, longest, longest_prefix = area, segment.length, segment.prefix_length
    return groups


def _places(groups: list[list[Segment]], offset: int) -> np.ndarray[Any, Any]:
    """Of each query, counted from this rank's first, in the groups' padded outputs one after the other."""
    places = np.empty(sum(s.length for group in groups for s in group), dtype=np.int64)
    first = 0
    for group in groups:
        length = max(s.length for s in group)
        for s in group:
            places[s.start - offset : s.end - offset] = np.arange(first, first + s.length)
            first += length
    return places


def _padded_group(segments: list[Segment], offset: int, device: torch.device) -> PaddedGroup:
    starts, lengths, prefix_starts, prefix_lengths = np.array(
        [(s.start, s.length, s.prefix_start, s.prefix_length) for s in segments]
    ).T[:, :, None]
    length, prefix = lengths.max(), prefix_lengths.max()
    columns, prefix_columns = np.arange(length), np.arange(prefix)
    is_real, in_prefix = columns < lengths, prefix_columns < prefix_lengths
    queries = np.where(is_real, starts + columns, starts)
    keys = mask = None
    if prefix:
        keys = np.where(in_prefix, prefix_starts + prefix_columns, prefix_starts)
        mask = np.repeat(
            np.tri(length, prefix + length, prefix, dtype=bool)[None, None], len(segments), axis=0
        )
        mask[..., :prefix] = in_prefix[:, None, None]
    if prefix or offset:
        keys = queries if keys is None else np.concatenate([keys, queries], axis=1)
    runs_on = all(b.start == a.end for a, b in zip(segments, segments[1:], strict=False))
    is_view = keys is None and bool(is_real.all()) and runs_on
    return PaddedGroup(
        # Queries count from this rank's first token, keys from the row's.
        queries=copy_in(queries - offset, device),
        keys=None if keys is None else copy_in(keys, device),
        mask=None if mask is None else copy_in(mask, device),
        contiguous=segments[0].start if is_view else None,
    )


def _next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
