"""The fast path for steps of few rows on CUDA: eight kernels a layer, all of them launched ahead of their inputs.

    embed ─► norm ─► qkv parts ─► turn, write cache ─► attend ─► out parts ─┐
                ▲                                                           ▼
                └── (Σ, +, norm) ◄── down parts ◄── gate_up · act ◄── (Σ, +, norm)

A decode step of up to MAX_ROWS sequences does little arithmetic and reads every weight once. What the library's
products leave unused there, and the gaps between launches, cost more than half of such a step (docs/benchmarks.md).
The parameters are those of rill.models.decode.decoder.Decoder, and so is the arithmetic, up to the order in which a product
is summed: that order depends on the shape of the weight alone, not on the rows.

Called by rill.inference.native.cuda_runner for captured decode steps. Axes: B row, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from rill.models.decode.attention_paged import KVCache, PagedBatch
from rill.models.decode.decoder import Decoder, Layer, Projection
from rill.models.ops.triton_skinny import ProductShape, add_parts_norm, gated_product, product, turn_parts

MAX_ROWS = 64
TILE_N = 64
PREFETCH_BYTES = 8 << 20
"""Of a weight that is cut into parts, asked for before its product may begin. Programs of other products read for so
long that asking early changes nothing."""


class SkinnyDecoder:
    """Callable like decoder.Decoder, for batches of one token a row and at most MAX_ROWS rows."""

    def __init__(self, decoder: Decoder, head_VE: torch.Tensor) -> None:
        self._decoder, self._head = decoder, head_VE
        self._num_sms = torch.cuda.get_device_properties(head_VE.device).multi_processor_count

    @staticmethod
    def supports(decoder: Decoder, head_VE: torch.Tensor) -> bool:
        """Each projection lies in one piece of memory, and tiles divide it; launches can overlap from Hopper on."""
        if torch.cuda.get_device_capability(head_VE.device) < (9, 0):
            return False
        weights = [p.weight for layer in decoder.layers for p in _projections(layer)]
        return all(w is not None and w.shape[1] % 16 == 0 for w in (*weights, head_VE))

    def __call__(
        self, ids_B: torch.Tensor, positions_B: torch.Tensor, batch: PagedBatch, cache: KVCache
    ) -> torch.Tensor:
        """Last hidden states [B, E], after the final norm."""
        decoder, arch = self._decoder, self._decoder.arch
        eps, gemma = arch.eps, arch.is_gemma
        hidden = decoder.embed(ids_B)
        first = decoder.layers[0].norms.input_layernorm.weight
        x = decoder.ops.add_norm(hidden, None, first, eps, gemma=gemma)
        for layer in decoder.layers:
            keys, values, norms = cache.keys[layer.index], cache.values[layer.index], layer.norms
            query = turn_parts(
                self._parts(x, layer.qkv), layer.qkv.bias, decoder.cos, decoder.sin, positions_B, batch.slots_N,
                layer.q_norm, layer.k_norm, eps, keys, values, arch.num_heads,
            )  # fmt: skip
            attended = decoder.ops.attend_flat(
                query, query.shape[1], arch.num_heads, keys, values, batch,
                scale=arch.scale, window=layer.window, softcap=arch.softcap,
            )  # fmt: skip
            after_attention, after_mlp, before_mlp = None, None, norms.post_attention_layernorm.weight
            if arch.has_post_norms:
                after_attention, before_mlp = before_mlp, norms.pre_feedforward_layernorm.weight
                after_mlp = norms.post_feedforward_layernorm.weight
            parts = self._parts(attended.view(len(ids_B), -1), layer.out)
            x = add_parts_norm(hidden, parts, layer.out.bias, after_attention, before_mlp, eps, gemma=gemma)
            assert layer.gate_up.weight is not None
            shape = self._shape(layer.gate_up.weight, is_gated=True)
            x = gated_product(x, layer.gate_up.weight, shape, is_gelu=arch.is_gelu)
            parts = self._parts(x, layer.down)
            x = add_parts_norm(hidden, parts, None, after_mlp, decoder.norm_after(layer), eps, gemma=gemma)
        return x

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """[B, V] in the model's dtype."""
        shape = self._shape(self._head, is_cut=False)
        return product(hidden_BE, self._head, shape, dtype=hidden_BE.dtype)[0]

    def _parts(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        assert projection.weight is not None
        return product(x, projection.weight, self._shape(projection.weight), dtype=torch.float32)

    def _shape(self, weight: torch.Tensor, *, is_gated: bool = False, is_cut: bool = True) -> ProductShape:
        """The cut depends on the weight's shape alone, so a row's sums run in the same order in every batch."""
        num_out, num_in = weight.shape
        num_tiles, num_parts = -(-num_out // TILE_N), 1
        is_cut = is_cut and not is_gated
        tile_k = next(t for t in (128 if is_cut else 64, 64, 32, 16) if num_in % t == 0)
        if is_cut:
            num_blocks = num_in // tile_k
            num_parts = min(max(1, self._num_sms // num_tiles), num_blocks)
            num_parts = -(-num_blocks // -(-num_blocks // num_parts))  # no part without work
        per_row = PREFETCH_BYTES // (num_out * num_parts) // 128 * 128 if is_cut else 0
        return ProductShape(
            num_parts=num_parts,
            tile_n=TILE_N,
            tile_k=tile_k,
            num_stages=4,
            num_warps=4,
            prefetch_bytes=per_row,
        )


def _projections(layer: Layer) -> tuple[Projection, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down
