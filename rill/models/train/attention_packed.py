"""Attention over packed sequences: many sequences in one row, none seeing another (rill.models.train.packed_layout).

Registered in transformers' attention interface as `rill_packed`; a model loaded with that name takes the keyword
`packed=PackedLayout(...)` in its forward call. Callers: rill.training only.

Exact routes, chosen by device, dtype and head width: rill.models.ops.triton_segments (Hopper GPUs, 16-bit),
FlashAttention's variable-length kernel (other CUDA, 16-bit), and padded batches of segments of similar shape through
scaled_dot_product_attention (everything else). Architectures that
cap their scores or have learnt sinks take the padded batches everywhere, with scores written out. With context
parallelism a rank holds a slice of the row, and keys and values are gathered over the group first.

M token of the pack, Q query token of this rank, H query head, G key/value head, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from rill.errors import UnsupportedError
from rill.models.eager import ScoreRule, decoder_blocks, decoder_of
from rill.models.ops.torch_kernels import attend
from rill.models.train.packed_layout import PackedLayout, PaddedGroup

ATTENTION_NAME = "rill_packed"
_TRITON_WIDTHS = (32, 64, 128)
"""Head widths of rill.models.ops.triton_segments; others take FlashAttention's kernel."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    packed: PackedLayout | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """[1, H, Q, E] queries → [1, Q, H, E]. The signature is transformers' attention interface."""
    if packed is None:
        raise UnsupportedError("the model's layers do not hand their arguments down to attention")
    if dropout:
        raise UnsupportedError("packed attention has no dropout: a policy is trained as it samples")
    if packed.context_group is not None:
        key, value = gather_row(key, value, packed.context_group)
    rule = ScoreRule.of(key, **arguments)
    if packed.groups:
        return _attend(query, key, value, packed, rule), None
    assert not rule.softcap and rule.sinks_H is None, (
        "a model of changes_scores() takes layouts without use_flash"
    )
    width = value.shape[-1]
    if width < key.shape[-1]:  # as in multi-head latent attention; the kernels know one width
        value = functional.pad(value, (0, key.shape[-1] - width))
    return _flash_attention(query, key, value, packed, rule)[..., :width], None


def changes_scores(model: nn.Module) -> bool:
    """Whether a model's attention is more than causal softmax: capped scores, as Gemma 2's, or sinks, as gpt-oss's."""
    values = model.config.get_text_config().to_dict()  # type: ignore[union-attr, operator]
    has_sinks = any("sink" in name for name, _ in model.named_parameters())
    return has_sinks or bool(values.get("attn_logit_softcapping"))


def register() -> None:
    """Make `rill_packed` known to transformers. Safe to call again.

    No mask function is registered: the layout is the mask, and looking for one transformers would wait for the device.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, rule: ScoreRule
) -> Tensor:
    query_QHE, key_MGE, value_MGE = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.key_index is not None:
        key_MGE = key_MGE.index_select(0, packed.key_index)
        value_MGE = value_MGE.index_select(0, packed.key_index)
    width = query_QHE.shape[-1]
    if packed.query_tiles is not None and packed.key_tiles is not None and width in _TRITON_WIDTHS:
        out_QHE: Tensor = torch.ops.rill.segment_attention(
            query_QHE, key_MGE, value_MGE, packed.query_tiles, packed.key_tiles, rule.scale, rule.window
        )[0]
        return out_QHE[None]
    # The kernel aligns the causal mask to the bottom right: the last query of a segment sees its last key.
    out_QHE = torch.ops.aten._flash_attention_forward(
        query_QHE, key_MGE, value_MGE, packed.cu_queries, packed.cu_keys, packed.max_queries, packed.max_keys,
        0.0, True, False, scale=rule.scale, window_size_left=rule.window - 1 if rule.window else None,
        window_size_right=0 if rule.window else None,
    )[0]  # fmt: skip
    return out_QHE[None]


def compile_decoder(model: Any) -> None:
    """torch.compile a decoder's layers, once for all of them and all row lengths, without the padded attention inside:
    its shapes differ with every pack, and each one would be compiled anew. And the norm behind the layers, which moves
    some sixty times its row when it is computed operation by operation."""
    global _attend
    # Here and not as a decorator: it imports the compiler, seconds that a process without compiled layers can spare.
    _attend = torch.compiler.disable(_padded_attention)  # type: ignore[no-untyped-call]
    for layer in decoder_blocks(model):
        layer.compile(dynamic=True)
    norm = getattr(decoder_of(model), "norm", None)
    if norm is not None:
        # By its forward: calls of all modules together have one, small, number of compiled variants.
        norm.forward = torch.compile(norm.forward, dynamic=True)


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, rule: ScoreRule
) -> Tensor:
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        # torch's CPU kernel has a backward pass in bfloat16 that takes many times that in float32.
        query, key, value = query.float(), key.float(), value.float()
    query_QHE, key_MGE, value_MGE = (x[0].transpose(0, 1) for x in (query, key, value))
    num_repeats = query_QHE.shape[1] // key_MGE.shape[1]
    pieces: list[Tensor] = []
    for group in packed.groups:
        q, k, v = (_take(x, group) for x in (query_QHE, key_MGE, value_MGE))
        if group.keys is not None:
            k, v = key_MGE[group.keys].transpose(1, 2), value_MGE[group.keys].transpose(1, 2)
        mask = group.mask
        if rule.window and k.shape[2] > rule.window:
            mask = _windowed(_causal(q, k) if mask is None else mask, rule.window)
        if rule.softcap or rule.sinks_H is not None:
            out_bHqE = attend(q, k, v, _causal(q, k) if mask is None else mask, rule)
        else:
            if num_repeats > 1:
                k, v = (x.repeat_interleave(num_repeats, dim=1) for x in (k, v))
            out_bHqE = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=rule.scale
            )
        pieces.append(out_bHqE.transpose(1, 2).flatten(0, 1))
    out_QHE = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if packed.places is not None:
        out_QHE = out_QHE.index_select(0, packed.places)
    return out_QHE[None].to(dtype)


def _take(x_MHE: Tensor, group: PaddedGroup) -> Tensor:
    """[b, heads, q, E] of a group's queries."""
    num_rows, num_cols = group.queries.shape
    if group.contiguous is not None:
        block = x_MHE[group.contiguous : group.contiguous + num_rows * num_cols]
        return block.view(num_rows, num_cols, *block.shape[1:]).transpose(1, 2)
    return x_MHE[group.queries].transpose(1, 2)


def _causal(query_bHqE: Tensor, key_bGkE: Tensor) -> Tensor:
    size = (1, 1, query_bHqE.shape[2], key_bGkE.shape[2])
    return torch.ones(size, dtype=torch.bool, device=query_bHqE.device).tril()


def _windowed(mask: Tensor, window: int) -> Tensor:
    """The mask without keys that lie `window` or more tokens before a query, counted from the prefix's start."""
    (*_, q, k), device = mask.shape, mask.device
    width = k - q  # of the widest prefix; a shorter one leaves columns between itself and the segment's own
    prefix_b1 = mask[:, 0, 0, :width].sum(-1, keepdim=True)
    query_at_bq = prefix_b1 + torch.arange(q, device=device)
    prefix_at_bw = torch.arange(width, device=device).expand(len(prefix_b1), width)
    key_at_bk = torch.cat((prefix_at_bw, query_at_bq), dim=1)
    return mask & (query_at_bq[:, :, None] - key_at_bk[:, None, :] < window)[:, None]


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
        parts = [part.contiguous() for part in grads[0].chunk(dist.get_world_size(ctx.group), dim=3)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


_attend = _padded_attention
