"""A decoder whose products, or whose cache, have fewer bits.

8 bits: every weight has a scale, and every token of an activation.

    from Hopper on   weights are held in 8 bits; the kernels that make activations (norm, activation) write them in 8
                     bits too, and steps of few rows have kernels of their own (skinny.py)
    elsewhere        weights, activations, keys and values are rounded to what 8 bits hold: the same numbers, no gain

4 bits (rill.models.ops.int4): weights are rounded to what groups of 4 bits hold and multiplied as before, at no gain in
time: what a model that will be served so says, and is trained on.

A part of a joined projection has a scale of its own, so an update of some names touches no others. Embedding, norms,
biases and the output layer stay as they are.

Called by rill.inference.native once it has compared the decoder with the model's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rill.errors import UnsupportedError
from rill.models.decode.attention_paged import CacheRows, DecoderOps
from rill.models.decode.decoder import Decoder, KernelStages
from rill.models.decode.structure import Layer, Projection, Structure
from rill.models.ops.fp8 import Activations, Fp8Rows, ProductScales, multiplies_fp8, rounded, rounded_plain
from rill.models.ops.int4 import check_groups, rounded_int4

Writer = Callable[[Tensor], object]
"""Brings a whole new parameter to the form in which it is held."""


def quantize_weights(structure: Structure, kind: str) -> dict[int, Writer]:
    """In place, `fp8` or `int4`. By id of a parameter: what writes the one that an update brings."""
    projections = [p for layer in structure.layers for p in layer.projections]
    held = [p.weight for p in projections if p.weight is not None]
    is_native = kind == "fp8" and multiplies_fp8(structure.final_norm.weight.device)
    if not structure.is_dense:
        raise UnsupportedError("experts are called as they are: quantization is for dense models")
    if len(held) < len(projections):
        raise UnsupportedError(
            "quantization moves weights, which a model that others hold too does not allow"
        )
    if kind == "int4":
        check_groups(held)
    wrong = next((tuple(w.shape) for w in held if w.shape[0] % 16 or w.shape[1] % 16), None)
    if is_native and (wrong or structure.final_norm.weight.dtype is not torch.bfloat16):
        what = f"a weight is {wrong}" if wrong else f"the model is in {structure.final_norm.weight.dtype}"
        raise UnsupportedError(
            f"quantization on CUDA is for bfloat16 and sizes of multiples of 16, and {what}"
        )
    as_held = rounded_int4 if kind == "int4" else partial(rounded, is_weight=True)
    found: dict[int, Writer] = {}
    for projection in projections:
        found |= _in_8_bits(projection) if is_native else _rounded(projection, as_held)
    return found


@torch.no_grad()
def _rounded(projection: Projection, as_held: Callable[[Tensor], Tensor]) -> dict[int, Writer]:
    found: dict[int, Writer] = {}
    for module in projection.modules:

        def write(new: Tensor, into: Tensor = module.weight) -> None:
            into.data.copy_(as_held(new.to(into.dtype)))

        write(module.weight.data)
        found[id(module.weight)] = write
    return found


@torch.no_grad()
def _in_8_bits(projection: Projection) -> dict[int, Writer]:
    assert projection.weight is not None
    found: dict[int, Writer] = {}
    rows = Fp8Rows.empty(projection.weight.shape, projection.weight.device)
    start = 0
    for module in projection.modules:
        end = start + len(module.weight)
        part = Fp8Rows(rows.values_BK[start:end], rows.scales_B[start:end])
        part.write(module.weight.data, is_weight=True)
        module.weight.requires_grad_(False)
        module.weight.data = part.values_BK  # who moves a model's parameters out of memory finds it there
        found[id(module.weight)] = partial(part.write, is_weight=True)
        start = end
    projection.weight, projection.scales = rows
    return found


def quantize_stages(decoder: Decoder, *, weights: bool, cache: bool) -> None:
    """`weights`: they have 8 bits; `cache`: keys and values have."""
    ops = decoder.ops
    if multiplies_fp8(decoder.structure.final_norm.weight.device):
        if weights:  # the kernels write and read whatever the cache holds
            decoder.stages = Fp8Stages(ops, ops.linear)
    elif weights or cache:
        decoder.stages = RoundedStages(ops, weights=weights, cache=cache)


class Fp8Stages(KernelStages):
    """Activations are made in 8 bits and multiplied so; a product's scales are applied by the kernel that reads it."""

    def multiplied(
        self, projection: Projection, x: Activations, *, is_whole: bool, may_be_parts: bool = False
    ) -> tuple[Tensor, tuple[ProductScales, ...]]:
        assert projection.weight is not None
        rows = Fp8Rows.of(x) if isinstance(x, Tensor) else x
        parts = rows.product_in_parts(projection.weight) if may_be_parts else None
        y = rows.product(projection.weight) if parts is None else parts
        scales = ProductScales(rows.scales_B, projection.scales, projection.bias)
        return (scales.applied(y), ()) if is_whole else (y, (scales,))


class RoundedStages(KernelStages):
    def __init__(self, ops: DecoderOps, *, weights: bool, cache: bool) -> None:
        super().__init__(ops, ops.linear)
        self._weights, self._cache = weights, cache

    def queries(self, x: Activations, layer: Layer, rows: CacheRows) -> Tensor:
        qkv = super().queries(x, layer, rows)
        slots = rows.slots_N.long()
        for held in (rows.keys, rows.values) if self._cache else ():
            flat = held.view(-1, *held.shape[2:])
            flat[slots] = rounded_plain(flat[slots])
        return qkv

    def project(self, projection: Projection, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return super().project(projection, rounded(x) if self._weights else x)
