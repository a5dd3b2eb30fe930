"""The engine's short way through a decoder-only transformer: the modules' parameters, one operation per stage.

There is one loop, for every architecture that rill.models.decode.structure can describe and for every device. What a
stage costs is behind `Stages`: `KernelStages` calls one kernel after the other (torch, C++ or Triton: rill.models.ops),
rill.models.decode.skinny joins products with what follows them, for CUDA steps of few rows.

    embed ─► norm ─► qkv ─► [q, k norm] rope, write cache ─► attend ─► out ─┐
                ▲                                                           ▼
                └── (+, norm) ◄── down ◄── act · mul ◄── gate_up ◄── (+, norm)

Where several ranks hold the model (shards.py) each computes with its part: rank 0's tokens go to all, and `out` and
`down` are summed over the ranks.

Axes: N token of the flat batch, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from rill.models.decode.attention_paged import FlatKernels, KVCache, PagedBatch
from rill.models.decode.structure import MLP, Layer, LinearFn, Norm, Projection, Structure
from rill.models.decode.tensor_group import TensorGroup
from rill.models.ops.fp8 import NO_SCALES, Activations, ProductScales

if TYPE_CHECKING:
    from rill.models.decode.low_rank import AdapterRows
    from rill.models.vision import VisualRows


class DecoderOps(FlatKernels, Protocol):
    """The operations of a decoder, on one kind of device."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def add_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool,
    ) -> torch.Tensor:
        """hidden += addend, in place; returns RMSNorm(hidden)."""
        ...

    def act_mul(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor: ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_heads: int,
    ) -> None: ...


class Stages(Protocol):
    """How the stages of a layer are computed."""

    def queries(
        self,
        x: Activations,
        layer: Layer,
        rope: tuple[torch.Tensor, torch.Tensor],
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Rows that begin with the layer's queries, turned; keys and values are in the cache."""
        ...

    def gated(self, x: Activations, mlp: MLP) -> Activations:
        """act(x Gᵀ) · (x Uᵀ)."""
        ...

    def join(
        self,
        x: Activations,
        projection: Projection | None,
        hidden: torch.Tensor,
        post: Norm | None,
        following: Norm | None,
        scale: float,
    ) -> Activations:
        """hidden += scale · post(x Wᵀ), in place; returns following(hidden)."""
        ...


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
        self.stages: Stages = KernelStages(ops, self._linear, group=group)

    def __call__(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        batch: PagedBatch,
        cache: KVCache,
        *,
        stages: Stages | None = None,
        adapters: AdapterRows | None = None,
        visual: VisualRows | None = None,
    ) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm; `adapters`: each row's, beside the projections; `visual`:
        what rows hold in place of tokens, and where all of them stand in place of positions_N."""
        if adapters is not None:
            stages = KernelStages(self.ops, self._linear, adapters)
        stages = stages or self.stages
        structure, layers = self.structure, self.layers
        if self._group is not None:
            ids_N = self._group.broadcast(ids_N)
        hidden = structure.embed(ids_N)
        if structure.embed_scale != 1.0:
            hidden = hidden * structure.embed_scale
        ropes, deep = structure.ropes, 0
        if visual is not None:
            hidden = hidden.index_copy(0, visual.rows_P, visual.features_DPE[0])
            # A table with a row for each token, in place of one for each position.
            ropes = [structure.turned_by(visual.positions_3N)]
            positions_N = torch.arange(len(ids_N), dtype=positions_N.dtype, device=positions_N.device)
            deep = len(visual.features_DPE) - 1
        x: Activations = self._normed(hidden, layers[0].before_attention)
        for layer in layers:
            call, keys, values = layer.call, cache.keys[layer.index], cache.values[layer.index]
            rope = ropes[layer.rope]
            query = stages.queries(x, layer, rope, positions_N, batch.slots_N, keys, values)
            attended = self.ops.attend_flat(
                query, query.shape[1], call.num_heads, keys, values, batch,
                scale=call.scale, window=call.window, softcap=call.softcap, sinks_H=call.sinks_H,
            ).view(len(ids_N), -1)  # fmt: skip
            scale = layer.residual_scale
            x = stages.join(attended, layer.out, hidden, layer.after_attention, layer.before_mlp, scale)
            is_deepened = layer.index < deep
            following = None if is_deepened else self._following(layer)
            if isinstance(layer.mlp, MLP):
                inner = stages.gated(x, layer.mlp)
                x = stages.join(inner, layer.mlp.down, hidden, layer.after_mlp, following, scale)
            else:
                assert isinstance(x, torch.Tensor)
                x = stages.join(_called(layer.mlp, x), None, hidden, layer.after_mlp, following, scale)
            if is_deepened:
                assert visual is not None
                hidden.index_add_(0, visual.rows_P, visual.features_DPE[layer.index + 1])
                x = self._normed(hidden, self._following(layer))
        assert isinstance(x, torch.Tensor)  # the last norm's
        return x

    def _normed(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return hidden
        return self.ops.add_norm(hidden, None, norm.weight, norm.eps, gemma=norm.is_offset)

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

    def queries(
        self,
        x: Activations,
        layer: Layer,
        rope: tuple[torch.Tensor, torch.Tensor],
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        q_norm, k_norm, call = layer.q_norm, layer.k_norm, layer.call
        is_other = q_norm is not None and (q_norm.is_offset or len(q_norm.weight) != call.key_dim)
        qkv, scales = self.multiplied(layer.qkv, x, is_whole=is_other)
        if q_norm is None or k_norm is None:
            weights, eps = (None, None), 0.0
        elif is_other:
            # Over the whole width, or of Gemma's kind: not one of the kernel's.
            width, kv_width = call.num_heads * call.key_dim, call.num_kv_heads * call.key_dim
            self._norm_in_place(qkv[:, :width], q_norm)
            self._norm_in_place(qkv[:, width : width + kv_width], k_norm)
            weights, eps = (None, None), 0.0
        else:
            weights, eps = (q_norm.weight, k_norm.weight), q_norm.eps  # type: ignore[assignment]
        self.store(scales, qkv, *rope, positions_N, slots_N, *weights, eps, keys, values, call.num_heads)
        return qkv

    def gated(self, x: Activations, mlp: MLP) -> Activations:
        gate_up, scales = self.multiplied(mlp.gate_up, x, is_whole=False)
        return self.activated(gate_up, mlp, *scales)

    def join(
        self,
        x: Activations,
        projection: Projection | None,
        hidden: torch.Tensor,
        post: Norm | None,
        following: Norm | None,
        scale: float,
    ) -> Activations:
        scales: tuple[ProductScales, ...] = ()
        if projection is not None:
            is_whole = post is not None or scale != 1.0 or following is None
            x, scales = self.multiplied(projection, x, is_whole=is_whole)
            if self._group is not None:
                x = self._group.all_reduce(x)
        assert isinstance(x, torch.Tensor)
        if post is not None:
            x = self._ops.add_norm(x, None, post.weight, post.eps, gemma=post.is_offset)
        if scale != 1.0:
            x = x * scale
        if following is None:
            return hidden.add_(x)
        return self.normed(hidden, x, following, *scales)

    def multiplied(
        self, projection: Projection, x: Activations, *, is_whole: bool
    ) -> tuple[torch.Tensor, tuple[ProductScales, ...]]:
        """A product, and what is left to do to it, if anything: never where is_whole."""
        return self.project(projection, x), ()

    def store(self, scales: tuple[ProductScales, ...], *arguments: Any) -> None:
        """rope_store."""
        self._ops.rope_store(*arguments)

    def activated(self, gate_up: torch.Tensor, mlp: MLP, scales: ProductScales = NO_SCALES) -> Activations:
        return self._ops.act_mul(gate_up, gelu=mlp.is_gelu)

    def normed(
        self, hidden: torch.Tensor, x: torch.Tensor, norm: Norm, scales: ProductScales = NO_SCALES
    ) -> Activations:
        """hidden += x, in place; returns norm(hidden)."""
        return self._ops.add_norm(hidden, x, norm.weight, norm.eps, gemma=norm.is_offset)

    def project(self, projection: Projection, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        y = projection(x, self._linear)
        return y if self._adapters is None else self._adapters.add_to(y, projection, x)

    def _norm_in_place(self, part: torch.Tensor, norm: Norm) -> None:
        rows = part.reshape(-1, len(norm.weight)).contiguous()
        part.copy_(
            self._ops.add_norm(rows, None, norm.weight, norm.eps, gemma=norm.is_offset).view(part.shape)
        )


def _called(module: Any, x: torch.Tensor) -> torch.Tensor:
    out = module(x[None])
    result: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return result.contiguous()
