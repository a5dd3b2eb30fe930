"""Attention over packed sequences: many sequences in one row, none seeing another.

Registered in transformers' attention interface as `rill_packed`; a model loaded with that name takes the keyword
`packed=PackedLayout(...)` in its forward call. Callers: rill.training only.

A pack is a row of M tokens made of segments. A segment's tokens attend causally to themselves and, if it has one,
to the whole of one earlier stretch, its prefix. A plain sequence is a segment without prefix; with prefix-tree
packing the shared prompt of a group is one segment and every answer a segment with that prompt as prefix:

    row        | prompt A | answer A0 | answer A1 | sequence B     |
    segment 0  [0 ─────── 5)
    segment 1  prefix [0,5) + [5 ──── 9)
    segment 2  prefix [0,5) +            [9 ──── 14)
    segment 3                                      [14 ────────── 20)

Exact routes, chosen by device, dtype and head width: rill.models.attention_triton (Hopper GPUs, 16-bit),
FlashAttention's variable-length kernel (other CUDA, 16-bit), and padded batches of segments of similar shape through
scaled_dot_product_attention (everything else; on the CPU rill.models.fused_layers comes before it). With context
parallelism a rank holds a slice of the row, and keys and values are gathered over the group first.

M token of the pack, Q query token of this rank, H query head, G key/value head, E head width, S segment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

ATTENTION_NAME = "rill_packed"
_TRITON_WIDTHS = (32, 64, 128)
"""Head widths of rill.models.attention_triton; others take FlashAttention's kernel."""
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
class _PaddedGroup:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """The segments as the C++ kernels want them: those with a prefix in common together, then the prefix's own."""

    table: Tensor
    """int64 [S, 4]: start, length, prefix start, prefix length."""
    ends: Tensor
    """int64 [families + 1]: where each begins in the table."""


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
    """Work lists of rill.models.attention_triton; None where it cannot run."""
    groups: tuple[_PaddedGroup, ...] = ()
    families: Families | None = None
    """On the CPU, unless the row is cut."""
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
        from rill.models.attention_triton import plan_tiles

        query_tiles, key_tiles = (copy_in(t, device) for t in plan_tiles(query_lengths, key_lengths))
    return PackedLayout(
        segments=tuple(segments),
        cu_queries=_cumulative(query_lengths, device),
        cu_keys=_cumulative(key_lengths, device),
        max_queries=_next_power_of_two(max(query_lengths)),
        max_keys=_next_power_of_two(max(key_lengths)),
        key_index=key_index,
        query_tiles=query_tiles,
        key_tiles=key_tiles,
        groups=() if use_flash else _padded_groups(segments, offset, device),
        families=_families(segments) if device.type == "cpu" and context_group is None else None,
        context_group=context_group,
    )


@functools.cache
def _has_segment_kernels(device: torch.device) -> bool:
    """rill.models.attention_triton is built for Hopper's copy engine and the size of its shared memory."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device)[0] == 9


def copy_in(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A device copy that does not wait: from pageable memory CUDA would first finish all work already queued."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def can_use_flash(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, H, Q, E] queries → [1, Q, H, E]. The signature is transformers' attention interface."""
    assert packed is not None, "a model loaded with rill_packed attention must be called with packed=…"
    assert dropout == 0.0 and kwargs.get("softcap") is None, (
        "attention dropout and soft-capping are not supported"
    )
    if packed.context_group is not None:
        key, value = gather_row(key, value, packed.context_group)
    if packed.groups:
        return _attend(query, key, value, packed, scaling, sliding_window), None
    return _flash_attention(query, key, value, packed, scaling, sliding_window), None


def register() -> None:
    """Make `rill_packed` known to transformers. Safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout is the mask; transformers need build none."""
    return None


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    query_QHE, key_MGE, value_MGE = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.key_index is not None:
        key_MGE = key_MGE.index_select(0, packed.key_index)
        value_MGE = value_MGE.index_select(0, packed.key_index)
    width = query_QHE.shape[-1]
    if packed.query_tiles is not None and packed.key_tiles is not None and width in _TRITON_WIDTHS:
        out_QHE: Tensor = torch.ops.rill.segment_attention(
            query_QHE,
            key_MGE,
            value_MGE,
            packed.query_tiles,
            packed.key_tiles,
            width**-0.5 if scaling is None else scaling,
            sliding_window or 0,
        )[0]
        return out_QHE[None]
    # The kernel aligns the causal mask to the bottom right: the last query of a segment sees its last key.
    out_QHE = torch.ops.aten._flash_attention_forward(
        query_QHE,
        key_MGE,
        value_MGE,
        packed.cu_queries,
        packed.cu_keys,
        packed.max_queries,
        packed.max_keys,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=None if sliding_window is None else sliding_window - 1,
        window_size_right=None if sliding_window is None else 0,
    )[0]
    return out_QHE[None]


def compile_layer(layer: nn.Module) -> None:
    """torch.compile a decoder layer, once for all row lengths, without the padded attention inside it: its shapes
    differ with every pack, and each one would be compiled anew."""
    global _attend
    # Here and not as a decorator: it imports the compiler, seconds that a process without compiled layers can spare.
    _attend = torch.compiler.disable(_padded_attention)  # type: ignore[no-untyped-call]
    layer.compile(dynamic=True)


def _padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        # torch's CPU kernel has a backward pass in bfloat16 that takes many times that in float32.
        query, key, value = query.float(), key.float(), value.float()
    query_QHE, key_MGE, value_MGE = (x[0].transpose(0, 1) for x in (query, key, value))
    num_repeats = query_QHE.shape[1] // key_MGE.shape[1]
    pieces: list[Tensor] = []
    rows: list[Tensor] = []
    for group in packed.groups:
        q, k, v = (_take(x, group) for x in (query_QHE, key_MGE, value_MGE))
        if group.keys is not None:
            k, v = key_MGE[group.keys].transpose(1, 2), value_MGE[group.keys].transpose(1, 2)
        mask = group.mask
        if sliding_window is not None and k.shape[2] > sliding_window:
            mask = _windowed(mask, q.shape[2], k.shape[2], sliding_window, q.device)
        out_bHqE = functional.scaled_dot_product_attention(
            q,
            _repeat_heads(k, num_repeats),
            _repeat_heads(v, num_repeats),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        out = out_bHqE.transpose(1, 2).flatten(0, 1)
        pieces.append(out if group.contiguous is not None else out.index_select(0, group.flat))
        rows.append(group.rows)
    if len(pieces) == 1 and packed.groups[0].contiguous is not None:
        return pieces[0][None].to(dtype)
    out_QHE = torch.cat(pieces).to(dtype)
    # rows is a permutation of the queries: its inverse puts every output back in its place.
    return out_QHE.index_select(0, torch.argsort(torch.cat(rows)))[None]


def _take(x_MHE: Tensor, group: _PaddedGroup) -> Tensor:
    """[b, heads, q, E] of a group's queries."""
    num_rows, num_cols = group.queries.shape
    if group.contiguous is not None:
        block = x_MHE[group.contiguous : group.contiguous + num_rows * num_cols]
        return block.view(num_rows, num_cols, *block.shape[1:]).transpose(1, 2)
    return x_MHE[group.queries].transpose(1, 2)


def _repeat_heads(x: Tensor, num_repeats: int) -> Tensor:
    if num_repeats == 1:
        return x
    b, g, k, e = x.shape
    return x[:, :, None].expand(b, g, num_repeats, k, e).reshape(b, g * num_repeats, k, e)


def _windowed(mask: Tensor | None, q: int, k: int, window: int, device: torch.device) -> Tensor:
    assert mask is None, "sliding-window layers cannot be combined with prefix segments on this route"
    distance = torch.arange(q, device=device)[:, None] - torch.arange(k, device=device)[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def _families(segments: Sequence[Segment]) -> Families:
    members: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        own = (segment.start, segment.end)
        members.setdefault(
            (segment.prefix_start, segment.prefix_end) if segment.prefix_length else own, []
        ).append(segment)
    ordered = [sorted(family, key=lambda s: (-s.prefix_length, s.start)) for family in members.values()]
    table = [(s.start, s.length, s.prefix_start, s.prefix_length) for family in ordered for s in family]
    ends = np.cumsum([0] + [len(family) for family in ordered])
    return Families(
        table=torch.tensor(table, dtype=torch.int64), ends=torch.from_numpy(ends.astype(np.int64))
    )


def _padded_groups(
    segments: Sequence[Segment], offset: int, device: torch.device
) -> tuple[_PaddedGroup, ...]:
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


def _padded_group(segments: list[Segment], offset: int, device: torch.device) -> _PaddedGroup:
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

    return _PaddedGroup(
        # Queries and the scattered output count from this rank's first token, keys from the row's.
        queries=copy_in(queries - offset, device),
        keys=copy_in(queries if keys is None else keys, device) if offset or keys is not None else None,
        mask=None if mask is None else copy_in(mask, device),
        flat=copy_in(np.flatnonzero(is_real.ravel()), device),
        rows=copy_in((queries - offset)[is_real], device),
        contiguous=segments[0].start - offset if is_view and not offset else None,
    )


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return copy_in(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


def _next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# --- context parallelism ----------------------------------------------------------------------------------


def gather_row(key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """[1, G, Q, E] of this rank → [1, G, M, E] of the whole row; gradients are summed back to their owners."""
    both = _GatherTokens.apply(torch.stack((key, value)), group)  # type: ignore[no-untyped-call]
    return both[0], both[1]


class _GatherTokens(torch.autograd.Function):
    """All-gather over dimension 3 (tokens); the backward pass is a reduce-scatter. Slices are equal in size."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=3)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        size = total.shape[3] // dist.get_world_size(ctx.group)
        rank = dist.get_rank(ctx.group)
        return total.narrow(3, rank * size, size).contiguous(), None


_attend = _padded_attention
