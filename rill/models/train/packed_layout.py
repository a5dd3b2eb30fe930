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
    flat: Tensor
    """int64: positions of the real queries in the flattened [b, q]."""
    rows: Tensor
    """int64: row positions of the same real queries."""
    contiguous: int | None
    """Row start where the group is one run of equal lengths without padding: then it is a view, not a gather."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Everything attention needs to know of one pack; built once, used by every layer."""

    segments: tuple[Segment, ...]
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
    ends = np.cumsum([[0, *query_lengths], [0, *key_lengths]], axis=1).astype(np.int32)
    cu_queries, cu_keys = copy_in(ends, device)
    return PackedLayout(
        segments=tuple(segments),
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=_next_power_of_two(max(query_lengths)),
        max_keys=_next_power_of_two(max(key_lengths)),
        key_index=key_index,
        query_tiles=query_tiles,
        key_tiles=key_tiles,
        groups=() if use_flash else _padded_groups(segments, offset, device),
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


def _padded_groups(segments: Sequence[Segment], offset: int, device: torch.device) -> tuple[PaddedGroup, ...]:
    """Cut the segments, sorted by shape, where padding would exceed _MAX_PADDING.

    Order within equal shapes is row order, so a row of equal lengths stays one contiguous view.
    """
    if (
        len({(s.length, s.prefix_length) for s in segments}) == 1
        and not segments[0].prefix_length
        and offset == 0
    ):
        return (_padded_group(list(segments), offset, device),)
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
    return tuple(_padded_group(group, offset, device) for group in groups)


def _padded_group(segments: list[Segment], offset: int, device: torch.device) -> PaddedGroup:
    length = max(s.length for s in segments)
    prefix = max(s.prefix_length for s in segments)
    starts = np.array([s.start for s in segments])[:, None]
    lengths = np.array([s.length for s in segments])[:, None]
    columns = np.arange(length)[None, :]
    is_real = columns < lengths
    queries = np.where(is_real, starts + columns, starts)
    keys = mask = None
    if prefix:
        prefix_starts = np.array([s.prefix_start for s in segments])[:, None]
        prefix_lengths = np.array([s.prefix_length for s in segments])[:, None]
        prefix_columns = np.arange(prefix)[None, :]
        in_prefix = prefix_columns < prefix_lengths
        keys = np.concatenate(
            [np.where(in_prefix, prefix_starts + prefix_columns, prefix_starts), queries], axis=1
        )
        mask = np.concatenate(
            [
                np.broadcast_to(in_prefix[:, None, :], (len(segments), length, prefix)),
                np.broadcast_to(np.tri(length, dtype=bool)[None], (len(segments), length, length)),
            ],
            axis=2,
        )[:, None]
    runs_on = all(b.start == a.end for a, b in zip(segments, segments[1:], strict=False))
    is_view = prefix == 0 and bool(is_real.all()) and runs_on

    return PaddedGroup(
        # Queries and the scattered output count from this rank's first token, keys from the row's.
        queries=copy_in(queries - offset, device),
        keys=copy_in(queries if keys is None else keys, device) if offset or keys is not None else None,
        mask=None if mask is None else copy_in(mask, device),
        flat=copy_in(np.flatnonzero(is_real.ravel()), device),
        rows=copy_in((queries - offset)[is_real], device),
        contiguous=segments[0].start - offset if is_view and not offset else None,
    )


def _next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
