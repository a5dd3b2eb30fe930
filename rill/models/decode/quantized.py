"""A decoder whose products, or whose cache, have 8 bits: weights are quantised row by row, activations token by token.

    from Hopper on   weights are held in 8 bits; the kernels that make activations (norm, activation) write them in 8
                     bits too, and steps of few rows have kernels of their own (skinny.py)
    elsewhere        weights, activations, keys and values are rounded to what 8 bits hold: the same numbers, no gain

Every row of a weight has a scale of its own, so a part of a joined projection is quantised by itself, and an update of
some names touches no others. Embedding, norms, biases and the output layer stay as they are.

Called by rill.inference.native once it has compared the decoder with the model's modules.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch

from rill.errors import UnsupportedError
from rill.models.decode.decoder import Decoder, KernelStages
from rill.models.decode.structure import MLP, Layer, Norm, Projection, Structure
from rill.models.ops.fp8 import (
    NO_SCALES,
    Activations,
    Fp8Rows,
    ProductScales,
    multiplies_fp8,
    rounded,
    rounded_plain,
)


def quantize_weights(structure: Structure) -> dict[int, Fp8Rows | None]:
    """In place. By id of a parameter: where what an update brings is written in 8 bits; None: it is rounded."""
    weights = [p.weight for layer in structure.layers for p in layer.projections]
    is_native = multiplies_fp8(structure.final_norm.weight.device)
    if not structure.is_dense:
        raise UnsupportedError("experts are called as they are: quantization is for dense models")
    if any(w is None for w in weights):
        raise UnsupportedError(
            "quantization moves weights, which a model that others hold too does not allow"
        )
    wrong = next(
        (tuple(w.shape) for w in weights if w is not None and (w.shape[0] % 16 or w.shape[1] % 16)), None
    )
    if is_native and (wrong or structure.final_norm.weight.dtype is not torch.bfloat16):
        what = f"a weight is {wrong}" if wrong else f"the model is in {structure.final_norm.weight.dtype}"
        raise UnsupportedError(
            f"quantization on CUDA is for bfloat16 and sizes of multiples of 16, and {what}"
        )
    found: dict[int, Fp8Rows | None] = {}
    for layer in structure.layers:
        for projection in layer.projections:
            found |= _quantize(projection, is_native=is_native)
    return found


@torch.no_grad()
def _quantize(projection: Projection, *, is_native: bool) -> dict[int, Fp8Rows | None]:
    assert projection.weight is not None
    if not is_native:
        projection.weight.data.copy_(rounded(projection.weight.data))
        return {id(module.weight): None for module in projection.modules}
    rows = Fp8Rows.of(projection.weight.data)
    projection.weight, projection.scales = rows
    found: dict[int, Fp8Rows | None] = {}
    start = 0
    for module in projection.modules:
        end = start + len(module.weight)
        part = Fp8Rows(rows.values_BK[start:end], rows.scales_B[start:end])
        module.weight.requires_grad_(False)
        module.weight.data = part.values_BK  # who moves a model's parameters out of memory finds it there
        found[id(module.weight)] = part
        start = end
    return found


def quantized_decoder(decoder: Decoder, *, weights: bool, cache: bool) -> Decoder:
    """Over the same structure. `weights`: they have been quantised; `cache`: keys and values are."""
    is_native = multiplies_fp8(decoder.structure.final_norm.weight.device)
    if is_native and not weights:
        return decoder  # its kernels write and read whatever the cache holds
    made = Decoder(decoder.structure, decoder.ops)
    if is_native:
        made.stages = Fp8Stages(decoder)
    else:
        made.stages = RoundedStages(decoder, weights=weights, cache=cache)
    return made


class Fp8Ops(Protocol):
    """Operations on products that lack their scales, and with results that are written in 8 bits alone."""

    def rope_store(self, *arguments: Any) -> None: ...

    def add_norm_fp8(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool,
        scales: ProductScales,
        is_last: bool,
    ) -> Activations: ...

    def act_mul_fp8(self, gate_up: torch.Tensor, *, gelu: bool, scales: ProductScales) -> Fp8Rows: ...


class Fp8Stages(KernelStages):
    """Activations are made in 8 bits and multiplied so; a product's scales are applied by the kernel that reads it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.ops, decoder.ops.linear)
        self._kernels = cast(Fp8Ops, decoder.ops)
        self._final = decoder.structure.final_norm

    def multiplied(
        self, projection: Projection, x: Activations, *, is_whole: bool
    ) -> tuple[torch.Tensor, tuple[ProductScales, ...]]:
        assert projection.weight is not None
        rows = Fp8Rows.of(x) if isinstance(x, torch.Tensor) else x
        y, scales = (
            rows.product(projection.weight),
            ProductScales(rows.scales_B, projection.scales, projection.bias),
        )
        return (scales.applied(y), ()) if is_whole else (y, (scales,))

    def store(self, scales: tuple[ProductScales, ...], *arguments: Any) -> None:
        self._kernels.rope_store(*arguments, *scales)

    def activated(self, gate_up: torch.Tensor, mlp: MLP, scales: ProductScales = NO_SCALES) -> Activations:
        return self._kernels.act_mul_fp8(gate_up, gelu=mlp.is_gelu, scales=scales)

    def normed(
        self, hidden: torch.Tensor, x: torch.Tensor, norm: Norm, scales: ProductScales = NO_SCALES
    ) -> Activations:
        return self._kernels.add_norm_fp8(
            hidden, x, norm.weight, norm.eps, gemma=norm.is_offset, scales=scales, is_last=norm is self._final
        )


class RoundedStages(KernelStages):
    def __init__(self, decoder: Decoder, *, weights: bool, cache: bool) -> None:
        super().__init__(decoder.ops, decoder.ops.linear)
        self._weights, self._cache = weights, cache

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
        qkv = super().queries(x, layer, rope, positions_N, slots_N, keys, values)
        for held in (keys, values) if self._cache else ():
            flat = held.view(-1, *held.shape[2:])
            flat[slots_N.long()] = rounded_plain(flat[slots_N.long()])
        return qkv

    def project(self, projection: Projection, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return super().project(projection, rounded(x) if self._weights else x)
