"""The engine's short way through a decoder-only transformer: the modules' parameters, one operation per stage.

There is one loop, for every architecture that rill.models.decode.structure can describe and for every device. What a
stage costs is behind `KernelStages`, which calls one kernel after the other (torch, C++ or Triton: rill.models.ops);
rill.models.decode.skinny joins products with what follows them, for CUDA steps of few rows.

    embed ─► norm ─► qkv ─► [q, k norm] rope, write cache ─► attend ─► out ─┐
                ▲                                                           ▼
                └── (+, norm) ◄── down ◄── act · mul ◄── gate_up ◄── (+, norm)

Where several ranks hold the model (shards.py) each computes with its part: rank 0's tokens go to all, and `out` and
`down` are summed over the ranks.

Axes: N token of the flat batch, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rill.models.decode.attention_paged import CacheRows, DecoderOps, LayerCache, PagedBatch
from rill.models.decode.structure import MLP, Layer, LinearFn, Norm, Projection, Structure
from rill.models.decode.tensor_group import TensorGroup
from rill.models.ops.fp8 import Activations, ProductScales

if TYPE_CHECKING:
    from rill.models.decode.low_rank import AdapterRows
    from rill.models.vision import VisualRows


class Decoder:
    def __init__(
        self,
        structure: Structure,
        ops: DecoderOps,
        linear: LinearFn | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        self.structure, self.ops = structure, ops
        self.layers = structure.layers
        self._linear: LinearFn = ops.linear if linear is None else linear
        self._group = group
        self.stages = KernelStages(ops, self._linear, group=group)

    def __call__(
        self,
        ids_N: Tensor,
        positions_N: Tensor,
        batch: PagedBatch,
        cache: list[LayerCache],
        *,
        stages: KernelStages | None = None,
        adapters: AdapterRows | None = None,
        visual: VisualRows | None = None,
    ) -> Tensor:
        """Last hidden states [N, E], after the final norm; `adapters`: each row's, beside the projections; `visual`:
        what rows hold in place of tokens, and where all of them stand in place of positions_N."""
        if adapters is not None:
            stages = KernelStages(self.ops, self._linear, adapters)
        stages = stages or self.stages
        structure, layers = self.structure, self.layers
        if self._group is not None:
            ids_N = self._group.broadcast(ids_N)
        hidden = self.embedded(ids_N)
        shown_rope, deep = None, 0
        if visual is not None:
            hidden = hidden.index_copy(0, visual.rows_P, visual.features_DPE[0])
            # A table with a row for each token, in place of one for each position.
            shown_rope = structure.turned_by(visual.positions_3N)
            positions_N = torch.arange(len(ids_N), dtype=positions_N.dtype, device=positions_N.device)
            deep = len(visual.features_DPE) - 1
        x: Activations = self._normed(hidden, layers[0].before_attention)
        for layer in layers:
            entered = x
            call, held = layer.call, cache[layer.index]
            rows = CacheRows(*(shown_rope or layer.rope), positions_N, batch.slots_N, *held)
            query = stages.queries(x, layer, rows)
            attended = self.ops.attend(query, call.num_heads, held, batch, call.rule).flatten(1)
            scale = layer.residual_scale
            x = stages.join(attended, layer.out, hidden, layer.after_attention, layer.before_mlp, scale)
            if layer.is_parallel:
                x = entered
            is_deepened = layer.index < deep
            following = None if is_deepened else self._following(layer)
            if isinstance(layer.mlp, MLP):
                inner = stages.gated(x, layer.mlp)
                x = stages.join(inner, layer.mlp.down, hidden, layer.after_mlp, following, scale)
            else:
                assert isinstance(x, Tensor)
                called = _called(layer.mlp, x)
                if self._group is not None:
                    called = self._group.all_reduce(called)
                x = stages.join(called, None, hidden, layer.after_mlp, following, scale)
            if is_deepened:
                assert visual is not None
                hidden.index_add_(0, visual.rows_P, visual.features_DPE[layer.index + 1])
                x = self._normed(hidden, self._following(layer))
        assert isinstance(x, Tensor)  # the last norm's
        return x

    def embedded(self, ids_N: Tensor) -> Tensor:
        embed, scale = self.structure.embed, self.structure.embed_scale
        if type(embed) is torch.nn.Embedding:
            hidden = self.ops.embed(ids_N, embed.weight)
        else:  # which may multiply, or more
            hidden = embed(ids_N)
        return hidden if scale == 1.0 else hidden * scale

    def _normed(self, hidden: Tensor, norm: Norm | None) -> Tensor:
        return hidden if norm is None else add_norm(self.ops, hidden, None, norm)

    def _following(self, layer: Layer) -> Norm | None:
        """The norm that comes after a layer's residual."""
        if layer.index + 1 == len(self.layers):
            return self.structure.final_norm
        return self.layers[layer.index + 1].before_attention


class KernelStages:
    """One kernel after the other, with products of the caller's choice in between."""

    def __init__(
        self,
        ops: DecoderOps,
        linear: LinearFn,
        adapters: AdapterRows | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        self._ops, self._linear, self._adapters, self._group = ops, linear, adapters, group

    def queries(self, x: Activations, layer: Layer, rows: CacheRows) -> Tensor:
        """Rows that begin with the layer's queries, turned; keys and values are in the cache."""
        call = layer.call
        width, kv_width = call.num_heads * call.key_dim, call.num_kv_heads * call.key_dim
        qkv, scales = self.multiplied(layer.qkv, x, is_whole=not layer.turns_in_kernel)
        norms = layer.head_norms if layer.turns_in_kernel else None
        if layer.head_norms is not None and norms is None:
            self._norm_in_place(qkv[:, :width], layer.head_norms.query)
            self._norm_in_place(qkv[:, width : width + kv_width], layer.head_norms.key)
        if layer.turn is not None:
            layer.turn(qkv[:, : width + kv_width].view(len(qkv), -1, call.key_dim), rows.positions_N)
        self._ops.rope_store(qkv, rows, call.num_heads, norms, *scales)
        return qkv

    def gated(self, x: Activations, mlp: MLP) -> Activations:
        """act(x Gᵀ) · (x Uᵀ)."""
        gate_up, scales = self.multiplied(mlp.gate_up, x, is_whole=False)
        return self._ops.act_mul(gate_up, *scales, gelu=mlp.is_gelu)

    def join(
        self,
        x: Activations,
        projection: Projection | None,
        hidden: Tensor,
        post: Norm | None,
        following: Norm | None,
        scale: float,
    ) -> Activations:
        """hidden += scale · post(x Wᵀ), in place; returns following(hidden)."""
        scales: tuple[ProductScales, ...] = ()
        if projection is not None:
            is_whole = post is not None or scale != 1.0 or following is None or following.is_centered
            may_be_parts = not is_whole and self._group is None
            x, scales = self.multiplied(projection, x, is_whole=is_whole, may_be_parts=may_be_parts)
            if self._group is not None:
                x = self._group.all_reduce(x)
        assert isinstance(x, Tensor)
        if post is not None:
            x = add_norm(self._ops, x, None, post)
        if scale != 1.0:
            x = x * scale
        if following is None:
            return hidden.add_(x)
        return add_norm(self._ops, hidden, x, following, *scales)

    def multiplied(
        self, projection: Projection, x: Activations, *, is_whole: bool, may_be_parts: bool = False
    ) -> tuple[Tensor, tuple[ProductScales, ...]]:
        """A product, and what is left to do to it, if anything: never where is_whole. The operation that reads it does
        it, and gives activations in 8 bits. It may be [P, B, N], to be added up, where may_be_parts."""
        return self.project(projection, x), ()

    def project(self, projection: Projection, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        y = projection(x, self._linear)
        return y if self._adapters is None else self._adapters.add_to(y, projection, x)

    def _norm_in_place(self, part: Tensor, norm: Norm) -> None:
        rows = part.reshape(-1, len(norm.weight)).contiguous()
        part.copy_(add_norm(self._ops, rows, None, norm).view(part.shape))


def add_norm(
    ops: DecoderOps, hidden: Tensor, addend: Tensor | None, norm: Norm, *scales: ProductScales
) -> Tensor:
    """hidden += addend, in place; returns norm(hidden)."""
    if not norm.is_centered:
        return ops.add_norm(hidden, addend, norm, *scales)
    if addend is not None:
        hidden += addend
    return torch.nn.functional.layer_norm(hidden, norm.weight.shape, norm.weight, None, norm.eps)


def _called(module: Any, x: Tensor) -> Tensor:
    out = module(x[None])
    result: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return result.contiguous()
