"""Attention over a paged KV cache, registered with transformers as "rill_paged".

The engine runs a Hugging Face model on one flat row of tokens from many sequences. Every attention module calls
`paged_attention_forward`, which finds the batch and the cache in the calling thread's context, writes the new
keys and values into their slots and attends each sequence to its own blocks:

    with PagedContext(batch, cache, kernels):
        model(input_ids=ids_1N, position_ids=positions_1N, use_cache=False)

All of a layer's writes come before its reads, so sequences of one batch may share blocks that the batch itself
writes. The arithmetic is behind `DecoderOps` (rill.models.ops).

Axes: N token of the flat batch, B sequence, H query head, K key/value head, D head dimension, S block slot,
M block-table column.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rill.models.decode.decode_work import DecodeWork
from rill.models.decode.structure import HeadNorms, Norm
from rill.models.eager import ScoreRule

ATTENTION_NAME = "rill_paged"


@dataclass(slots=True)
class PagedBatch:
    """Where the tokens of a flat batch belong. Sequences with one new token come first."""

    slots_N: Tensor  # int64: block * block_size + offset; slots of block 0 are a bin
    query_starts_B1: Tensor  # int32, B + 1 entries
    context_lens_B: Tensor  # int32, tokens to attend to, the new ones included
    block_tables_BM: Tensor  # int32
    num_decodes: int
    # The fields below serve kernels on CUDA, where tables stay on the device with one row per running sequence.
    table_rows_B: Tensor | None = None  # int32: each sequence's row of block_tables_BM; None: its index
    decode_work: DecodeWork | None = None
    prefill_tiles: Tensor | None = None  # int32 [tiles, 2]: sequence and offset of its queries


class LayerCache(NamedTuple):
    """[num_blocks, block_size, K, D] each; of one width."""

    keys: Tensor
    values: Tensor


class CacheRows(NamedTuple):
    """Where the keys and values of a step's tokens go in one layer, and what its queries and keys are turned by."""

    cos: Tensor
    sin: Tensor
    positions_N: Tensor
    slots_N: Tensor
    keys: Tensor
    values: Tensor


class DecoderOps(Protocol):
    """The operations of a decoder, on one kind of device."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def embed(self, ids_N: Tensor, weight_VE: Tensor) -> Tensor: ...

    def add_norm(self, hidden: Tensor, addend: Tensor | None, norm: Norm) -> Tensor:
        """hidden += addend, in place; returns norm(hidden), which is not centered."""

    def act_mul(self, gate_up: Tensor, *, gelu: bool) -> Tensor: ...

    def rope_store(self, qkv: Tensor, rows: CacheRows, num_heads: int, norms: HeadNorms | None) -> None:
        """Queries are normed and turned in place; keys, likewise, and values go to their slots of the cache."""

    def attend(
        self, query_NW: Tensor, num_heads: int, cache: LayerCache, batch: PagedBatch, rule: ScoreRule
    ) -> Tensor:
        """[N, H, D]. `query_NW`: rows that begin with num_heads queries."""


_ACTIVE = threading.local()


@dataclass(slots=True)
class PagedContext:
    """What attention calls of this thread use inside its `with` block."""

    batch: PagedBatch
    cache: list[LayerCache]
    kernels: DecoderOps

    def __enter__(self) -> None:
        _ACTIVE.context = self

    def __exit__(self, *_: object) -> None:
        del _ACTIVE.context


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    context: PagedContext = _ACTIVE.context
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = cache = context.cache[layer]
    value_dim = value.shape[-1]
    if value_dim < values.shape[-1]:  # narrower than keys, as in multi-head latent attention
        value = torch.nn.functional.pad(value, (0, values.shape[-1] - value_dim))
    keys.view(-1, *keys.shape[2:]).index_copy_(0, context.batch.slots_N, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, context.batch.slots_N, value[0].transpose(0, 1))
    rule = ScoreRule.of(key, **arguments)
    query_NW = query[0].transpose(0, 1).flatten(1).contiguous()
    out_NHD = context.kernels.attend(query_NW, query.shape[1], cache, context.batch, rule)
    return out_NHD[None, ..., :value_dim], None


def register_paged_attention() -> str:
    """Make "rill_paged" known to transformers; returns the name. No mask is built for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME
