"""Stages for steps of few rows on CUDA: products joined with what follows, all launched ahead of their inputs.

    qkv parts ─► turn, write cache      out parts ─► (Σ, +, norm)      gate_up · act      down parts ─► (Σ, +, norm)

A decode step of up to MAX_ROWS sequences does little arithmetic and reads every weight once. What the library's
products leave unused there, and the gaps between launches, cost more than half of such a step (docs/benchmarks.md).
The arithmetic is that of rill.models.decode.decoder.KernelStages, up to the order in which a product is summed.

On Hopper steps of more than FEW_ROWS have the same stages with other products (rill.models.decode.hopper).

Called by rill.inference.native.cuda_runner for captured decode steps. Axes: B row, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rill.errors import EngineError
from rill.models.decode import hopper
from rill.models.decode.attention_paged import CacheRows
from rill.models.decode.decoder import Decoder, KernelStages
from rill.models.decode.structure import MLP, Layer, Norm, Projection
from rill.models.eager import TOLERANCES
from rill.models.ops.fp8 import FP8, Activations, Fp8Rows, ProductScales, values_and_scales
from rill.models.ops.triton_kernels import add_norm
from rill.models.ops.triton_skinny import ProductShape, product, turn_parts

MAX_ROWS = 64
FEW_ROWS, DEEP_ROWS = 16, 32
"""Up to so many, tiles are larger, fewer parts are asked for early, and WideStages are slower; or more tiles
are under way: found by trying, on an H200."""
PREFETCH_BYTES = 8 << 20
"""Of a weight that is cut into parts, asked for before its product may begin. Programs of other products read for so
long that asking early changes nothing."""


class SkinnyStages(KernelStages):
    """For batches of one token a row and at most MAX_ROWS rows."""

    def __init__(self, decoder: Decoder, head_VE: Tensor) -> None:
        super().__init__(decoder.ops, decoder.ops.linear)
        self._head = head_VE
        self._num_sms = torch.cuda.get_device_properties(head_VE.device).multi_processor_count

    @staticmethod
    def supports(decoder: Decoder, head_VE: Tensor) -> bool:
        """Each projection lies in one piece of memory, and tiles divide it; launches can overlap from Hopper on."""
        if torch.cuda.get_device_capability(head_VE.device) < (9, 0):
            return False
        return all(_is_plain(layer) for layer in decoder.layers) and head_VE.shape[1] % 16 == 0

    def queries(self, x: Activations, layer: Layer, rows: CacheRows) -> Tensor:
        return turn_parts(
            self._parts(x, layer.qkv), layer.qkv.bias, rows, layer.call.num_heads, layer.head_norms
        )

    def gated(self, x: Activations, mlp: MLP) -> Tensor:
        return self._product(x, mlp.gate_up, self._head.dtype, is_gelu=mlp.is_gelu)[0]

    def join(
        self,
        x: Activations,
        projection: Projection | None,
        hidden: Tensor,
        post: Norm | None,
        following: Norm | None,
        scale: float,
    ) -> Activations:
        assert projection is not None and following is not None and scale == 1.0
        to_fp8 = projection.scales is not None and not following.is_last
        parts, bias = self._parts(x, projection), ProductScales(None, None, projection.bias)
        return add_norm(hidden, parts, bias, post, following, to_fp8=to_fp8)

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """[B, V] in the model's dtype."""
        shape = self._shape(self._head, len(hidden_BE), is_cut=False)
        return product(hidden_BE, self._head, shape, dtype=hidden_BE.dtype)[0]

    def _parts(self, x: Activations, projection: Projection) -> Tensor:
        return self._product(x, projection, torch.float32)

    def _product(
        self, x: Activations, projection: Projection, dtype: torch.dtype, is_gelu: bool | None = None
    ) -> Tensor:
        weight, scales = projection.weight, projection.scales
        assert weight is not None
        if scales is not None and isinstance(x, Tensor):
            x = Fp8Rows.of(x)
        shape = self._shape(weight, len(values_and_scales(x)[0]), is_gated=is_gelu is not None)
        return product(x, weight, shape, dtype=dtype, scales_N=scales, is_gelu=is_gelu)

    def _shape(
        self, weight: Tensor, rows: int, *, is_gated: bool = False, is_cut: bool = True
    ) -> ProductShape:
        num_out, num_in = weight.shape
        is_cut, is_few, is_fp8 = is_cut and not is_gated, rows <= FEW_ROWS, weight.dtype is FP8
        tile_n = 128 if is_few and is_cut and is_fp8 else 64
        num_tiles, num_parts = -(-num_out // tile_n), 1
        is_wide = is_cut or (is_gated and is_few) or is_fp8
        widest = 256 if is_fp8 and is_cut and not is_few else 128 if is_wide else 64
        tile_k = next(t for t in (widest, 128, 64, 32, 16) if t <= widest and num_in % t == 0)
        if is_cut:
            num_blocks = num_in // tile_k
            num_parts = min(max(1, self._num_sms // num_tiles), num_blocks)
            num_parts = -(-num_blocks // -(-num_blocks // num_parts))  # no part without work
        num_stages = 4
        if tile_k == 256 or (is_gated and is_few and not is_fp8):
            num_stages = 3
        elif is_cut and weight.dtype.itemsize == 2 and rows <= DEEP_ROWS:
            num_stages = 6
        prefetch_bytes = PREFETCH_BYTES // (2 if is_few else 1)
        per_row = prefetch_bytes // (num_out * num_parts) // 128 * 128 if is_cut else 0
        return ProductShape(
            num_parts=num_parts,
            tile_n=tile_n,
            tile_k=tile_k,
            num_stages=num_stages,
            num_warps=4,
            prefetch_bytes=per_row,
        )


class WideStages(KernelStages):
    """For batches of one token a row, of more than FEW_ROWS and up to hopper.MAX_GATED_ROWS rows. Logits are as ever,
    and so is all but the gated product beyond hopper.MAX_ROWS."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.ops, decoder.ops.linear)
        self._decoder = decoder

    @staticmethod
    def supports(decoder: Decoder, device: torch.device) -> bool:
        """Of decoders that SkinnyStages support."""
        if torch.cuda.get_device_capability(device) != (9, 0):
            return False  # others have no such tensor cores
        weights = [p.weight for layer in decoder.layers for p in layer.projections]
        return all(weight is not None and hopper.multiplies(weight) for weight in weights)

    def check(self) -> None:
        """Raise where the first layer's MLP is another than with the library's products, or the source does not
        compile."""
        mlp = self._decoder.layers[0].mlp
        assert isinstance(mlp, MLP) and mlp.gate_up.weight is not None
        weight, rows = mlp.gate_up.weight, hopper.MAX_GATED_ROWS
        x = torch.arange(rows * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(rows, -1)
        plain = KernelStages(self._ops, self._linear)
        wanted = plain.project(mlp.down, plain.gated(x, mlp)).float()
        error = (_parts(self.gated(x, mlp), mlp.down).sum(0) - wanted).norm()
        if not error <= TOLERANCES[weight.dtype] * wanted.norm():
            raise EngineError(
                f"products for {rows} rows are {error:.2g} off the library's {wanted.norm():.2g}"
            )

    def queries(self, x: Activations, layer: Layer, rows: CacheRows) -> Tensor:
        assert isinstance(x, Tensor)
        if len(x) > hopper.MAX_ROWS:
            return super().queries(x, layer, rows)
        return turn_parts(_parts(x, layer.qkv), layer.qkv.bias, rows, layer.call.num_heads, layer.head_norms)

    def gated(self, x: Activations, mlp: MLP) -> Tensor:
        return _parts(x, mlp.gate_up, is_gelu=mlp.is_gelu)[0]

    def multiplied(
        self, projection: Projection, x: Activations, *, is_whole: bool, may_be_parts: bool = False
    ) -> tuple[Tensor, tuple[ProductScales, ...]]:
        assert isinstance(x, Tensor)
        if not may_be_parts or len(x) > hopper.MAX_ROWS:
            return super().multiplied(projection, x, is_whole=is_whole)
        return _parts(x, projection), (ProductScales(None, None, projection.bias),)


def _parts(x: Activations, projection: Projection, is_gelu: bool | None = None) -> Tensor:
    assert isinstance(x, Tensor) and projection.weight is not None
    return hopper.product(x, projection.weight, is_gelu=is_gelu)


def _is_plain(layer: Layer) -> bool:
    """What the joined kernels compute: dense, norms before each half, of one kind, and no scaled residual."""
    if not isinstance(layer.mlp, MLP) or layer.before_attention is None or layer.before_mlp is None:
        return False
    posts = (layer.after_attention, layer.after_mlp)
    kinds = {
        (n.is_offset, n.is_centered, n.eps)
        for n in (layer.before_attention, layer.before_mlp, *posts)
        if n is not None
    }
    return (
        len(kinds) == 1
        and not layer.before_mlp.is_centered
        and layer.turns_in_kernel
        and layer.residual_scale == 1.0
        and all(p.weight is not None and p.weight.shape[1] % 16 == 0 for p in layer.projections)
    )
