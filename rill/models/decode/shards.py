"""What one rank of a tensor-parallel engine holds of a model: heads of the attention, columns of the MLP or experts.

    x ─► qkv: these heads ─► attend ─► out: their columns ─► Σ over ranks ─► (+)
      ─► gate_up: these rows ─► act · mul ─► down: their columns ─► Σ over ranks ─► (+)

Of experts, shared ones too, every rank holds the same columns; routers are whole, so all ranks choose alike.

`shard_model` reads the layers as the decoder does (structure.py), so whatever the decoder computes is cut by its
meaning and not by its name, and cuts the modules' own parameters in place. Embedding, head and norms are whole on every
rank: the head's product is a few per cent of a step, tokens are drawn in one place from whole rows of logits, and a
tied embedding stays one tensor. With fewer key/value heads than ranks, ranks that need the same one hold it each.

The cuts are kept by name: new weights arrive whole and are cut the same way (rill.inference.native.weight_update).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rill.errors import ConfigError, UnsupportedError
from rill.models.decode.structure import MLP, Layer, Projection, read_mlp, read_structure
from rill.models.decode.tensor_group import TensorGroup
from rill.models.eager import Probe
from rill.models.loading import empty_model, reads_pictures
from rill.models.routing import expert_blocks, is_stacked

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is spread over the ranks."""

    axis: int
    sections: tuple[tuple[int, int], ...]
    """(length, parts), one after the other along the axis: a rank holds one part of each; with fewer parts than ranks,
    some hold the same. Without sections rank 0 holds all of it and the others zeros: what is added once."""

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        if not self.sections:
            return whole if rank == 0 else torch.zeros_like(whole)
        pieces, start = [], 0
        for length, parts in self.sections:
            width = length // parts
            pieces.append(whole.narrow(self.axis, start + rank * parts // size * width, width))
            start += length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)


ADDED_ONCE = Cut(0, ())


@dataclass(frozen=True, slots=True)
class Shards:
    """A rank's place, and how the parameters that are not whole there were cut, by name."""

    group: TensorGroup
    cuts: Mapping[str, Cut]
    shapes: Mapping[str, torch.Size]
    """Of the whole parameters."""


def check_divides(model_config: PretrainedConfig, size: int) -> None:
    """Before anything is loaded: ConfigError or UnsupportedError where the model cannot be spread like that."""
    kind = model_config.model_type
    if reads_pictures(model_config):
        raise UnsupportedError(
            f"tensor_parallel_size {size}: {kind!r} has a vision tower, which stays on one device"
        )
    blocks = expert_blocks(empty_model(model_config))
    for block in blocks:
        _expert_cuts(block, size, kind)
    values = model_config.get_text_config().to_dict()
    heads = values.get("num_attention_heads")
    if heads is not None:
        _check_heads(int(heads), int(values.get("num_key_value_heads") or heads), size)
    if not blocks and (inner := values.get("intermediate_size")) is not None:
        _check_inner(int(inner), size)


@torch.no_grad()
def shard_model(model: PreTrainedModel, probe: Probe, group: TensorGroup) -> tuple[Probe, Shards]:
    """Cut the parameters in place, and say how the layers call attention with what is left."""
    structure = read_structure(model, probe, fuse=False, max_len=2)
    kind = model.config.model_type
    blocks = expert_blocks(model)
    if structure is None or not all(isinstance(at.mlp, MLP) or at.mlp in blocks for at in structure.layers):
        raise UnsupportedError(
            f"tensor_parallel_size {group.size}: {kind!r} does not run on the fast path, which is what is spread: set "
            "it to 1"
        )
    names = {module: name for name, module in model.named_modules()}
    cuts: dict[str, Cut] = {}
    for layer in structure.layers:
        for module, parameter, cut in _layer_cuts(layer, group.size, kind):
            if getattr(module, parameter) is not None:
                cuts[f"{names[module]}.{parameter}"] = cut
    shapes: dict[str, torch.Size] = {}
    for name, cut in cuts.items():
        whole = model.get_parameter(name)
        shapes[name] = whole.shape
        # A copy: a view would keep the whole, which is a mapped file or the only copy, where it is.
        whole.data = cut.part(whole.data, group.rank, group.size).clone(memory_format=torch.contiguous_format)
    calls = [
        replace(
            call, num_heads=call.num_heads // group.size, num_kv_heads=max(1, call.num_kv_heads // group.size)
        )
        for call in probe.calls
    ]
    queries = [
        (entered_TE.to(group.device), query_THD.chunk(group.size, dim=1)[group.rank].to(group.device))
        for entered_TE, query_THD in probe.queries
    ]
    seen = Probe(calls, queries, probe.ids_1T.to(group.device), probe.embedded_TE.to(group.device))
    return seen, Shards(group, cuts, shapes)


Named = tuple[nn.Module, str, Cut]
"""A module's parameter, and how it is cut."""


def _layer_cuts(layer: Layer, size: int, kind: str) -> list[Named]:
    call = layer.call
    norms = layer.head_norms
    if call.rule.sinks_H is not None or (norms is not None and len(norms.query.weight) != call.key_dim):
        what = "attention sinks" if call.rule.sinks_H is not None else "a norm over all heads together"
        raise UnsupportedError(
            f"tensor_parallel_size {size}: {kind!r} has {what}, which is not spread: set it to 1"
        )
    _check_heads(call.num_heads, call.num_kv_heads, size)
    queries = (call.num_heads * call.key_dim, size)
    keys = (call.num_kv_heads * call.key_dim, math.gcd(call.num_kv_heads, size))
    return [
        *_by_rows(layer.qkv, [queries, keys, keys]),
        *_by_columns(layer.out, queries),
        *(_mlp_cuts(layer.mlp, size) if isinstance(layer.mlp, MLP) else _expert_cuts(layer.mlp, size, kind)),
    ]


def _mlp_cuts(mlp: MLP, size: int) -> list[Named]:
    inner = mlp.down.modules[0].weight.shape[1]
    _check_inner(inner, size)
    return [*_by_rows(mlp.gate_up, [(inner, size), (inner, size)]), *_by_columns(mlp.down, (inner, size))]


def _expert_cuts(block: Any, size: int, kind: str) -> list[Named]:
    """What the block gives back is a summand then: experts are summed, and shared ones added, in proportion."""
    experts = block.experts
    shared = [mlp for child in block.children() if isinstance(mlp := read_mlp(child, fuse=False), MLP)]
    routers = [child for child in block.children() if child is not experts and _is_router(child, experts)]
    named = {parameter for child in (experts, *routers) for parameter in child.parameters()}
    named |= {m.weight for mlp in shared for p in (mlp.gate_up, mlp.down) for m in p.modules}
    if not is_stacked(experts) or any(parameter not in named for parameter in block.parameters()):
        raise UnsupportedError(
            f"tensor_parallel_size {size}: {kind!r} keeps its experts in a way that is not spread: set it to 1"
        )
    inner = experts.down_proj.shape[2]
    _check_inner(inner, size)
    own: list[Named] = [
        (experts, "gate_up_proj", Cut(1, ((inner, size), (inner, size)))),
        (experts, "down_proj", Cut(2, ((inner, size),))),
    ]
    return own + [cut for mlp in shared for cut in _mlp_cuts(mlp, size)]


def _is_router(child: nn.Module, experts: Any) -> bool:
    """It has a score for every expert, or one that says how much the shared ones count."""
    widths = {parameter.shape[0] for parameter in child.parameters()}
    return len(widths) == 1 and widths <= {experts.num_experts, 1}


def _by_rows(projection: Projection, sections: Sequence[tuple[int, int]]) -> list[Named]:
    """Each rank computes some of the outputs. One module may hold all sections, or each has its own."""
    modules = projection.modules
    own = [tuple(sections)] if len(modules) == 1 else [(section,) for section in sections]
    return [
        (module, name, Cut(0, each))
        for module, each in zip(modules, own, strict=True)
        for name in ("weight", "bias")
    ]


def _by_columns(projection: Projection, section: tuple[int, int]) -> list[Named]:
    """Each rank computes a summand of every output."""
    (module,) = projection.modules
    return [(module, "weight", Cut(1, (section,))), (module, "bias", ADDED_ONCE)]


def _check_heads(num_heads: int, num_kv_heads: int, size: int) -> None:
    if num_heads % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide the model's {num_heads} attention heads"
        )
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {size} neither divides the model's {num_kv_heads} key/value heads nor is a multiple"
            " of them"
        )


def _check_inner(inner: int, size: int) -> None:
    if inner % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide the model's intermediate_size {inner}"
        )
