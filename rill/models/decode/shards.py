"""What one rank of a tensor-parallel engine holds of a model: heads of the attention, columns of the MLP.

    x ─► qkv: these heads ─► attend ─► out: their columns ─► Σ over ranks ─► (+)
      ─► gate_up: these rows ─► act · mul ─► down: their columns ─► Σ over ranks ─► (+)

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
from typing import TYPE_CHECKING

import torch
from torch import nn

from rill.errors import ConfigError, UnsupportedError
from rill.models.decode.structure import MLP, Layer, Projection, read_structure
from rill.models.decode.tensor_group import TensorGroup
from rill.models.eager import Probe, has_tower
from rill.models.loading import empty_model
from rill.models.routing import expert_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is spread over the ranks."""

    axis: int
    sections: tuple[tuple[int, int], ...]
    """(length, parts), one after the other along the axis: a rank holds one part of each; with fewer parts than ranks,
    some hold the same. Without sections rank 0 holds all of it and the others zeros: what is added once."""

    def part(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
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
    empty = empty_model(model_config)
    if has_tower(empty):
        raise UnsupportedError(
            f"tensor_parallel_size {size}: {kind!r} has a vision tower, which stays on one device"
        )
    if expert_blocks(empty):
        raise UnsupportedError(
            f"tensor_parallel_size {size}: {kind!r} has experts, which are not spread: set it to 1"
        )
    values = model_config.get_text_config().to_dict()
    heads = values.get("num_attention_heads")
    if heads is not None:
        _check_heads(int(heads), int(values.get("num_key_value_heads") or heads), size)
    if (inner := values.get("intermediate_size")) is not None:
        _check_inner(int(inner), size)


@torch.no_grad()
def shard_model(model: PreTrainedModel, probe: Probe, group: TensorGroup) -> tuple[Probe, Shards]:
    """Cut the parameters in place, and say how the layers call attention with what is left."""
    structure = read_structure(model, probe, fuse=False, max_len=2)
    kind = model.config.model_type
    if structure is None or not structure.is_dense:
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
            call,
            num_heads=call.num_heads // group.size,
            num_kv_heads=max(1, call.num_kv_heads // group.size),
        )
        for call in probe.calls
    ]
    return Probe(calls, probe.ids_1T.to(group.device), probe.embedded_TE.to(group.device)), Shards(
        group, cuts, shapes
    )


def _layer_cuts(layer: Layer, size: int, kind: str) -> list[tuple[nn.Linear, str, Cut]]:
    call, mlp = layer.call, layer.mlp
    assert isinstance(mlp, MLP), "the structure is dense"
    if call.sinks_H is not None or (layer.q_norm is not None and len(layer.q_norm.weight) != call.key_dim):
        what = "attention sinks" if call.sinks_H is not None else "a norm over all heads together"
        raise UnsupportedError(
            f"tensor_parallel_size {size}: {kind!r} has {what}, which is not spread: set it to 1"
        )
    _check_heads(call.num_heads, call.num_kv_heads, size)
    inner = mlp.down.modules[0].weight.shape[1]
    _check_inner(inner, size)
    queries = (call.num_heads * call.key_dim, size)
    keys = (call.num_kv_heads * call.key_dim, math.gcd(call.num_kv_heads, size))
    return [
        *_by_rows(layer.qkv, [queries, keys, keys]),
        *_by_columns(layer.out, queries),
        *_by_rows(mlp.gate_up, [(inner, size), (inner, size)]),
        *_by_columns(mlp.down, (inner, size)),
    ]


def _by_rows(projection: Projection, sections: Sequence[tuple[int, int]]) -> list[tuple[nn.Linear, str, Cut]]:
    """Each rank computes some of the outputs. One module may hold all sections, or each has its own."""
    modules = projection.modules
    own = [tuple(sections)] if len(modules) == 1 else [(section,) for section in sections]
    return [
        (module, name, Cut(0, each))
        for module, each in zip(modules, own, strict=True)
        for name in ("weight", "bias")
    ]


def _by_columns(projection: Projection, section: tuple[int, int]) -> list[tuple[nn.Linear, str, Cut]]:
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
