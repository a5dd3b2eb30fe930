"""Attention over a paged KV cache, registered with transformers as "rill_paged".

The engine runs a Hugging Face model on one flat row of tokens from many sequences. Every attention module calls
`paged_attention_forward`, which finds the batch and the cache in the calling thread's context, writes the new
keys and values into their slots and attends each sequence to its own blocks:

    with paged_context(PagedContext(batch, cache, kernels)):
        model(input_ids=ids_1N, position_ids=positions_1N, use_cache=False)

All of a layer's writes come before its reads, so sequences of one batch may share blocks that the batch itself
writes. The arithmetic is behind `FlatKernels` (rill.models.ops).

Axes: N token of the flat batch, B sequence, H query head, K key/value head, D head dimension, S block slot,
M block-table column.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rill.models.decode.decode_work import DecodeWork

ATTENTION_NAME = "rill_paged"


@dataclass(slots=True)
class PagedBatch:
    """Where the tokens of a flat batch belong. Sequences with one new token come first."""

    slots_N: torch.Tensor  # int64: block * block_size + offset; slots of block 0 are a bin
    query_starts_B1: torch.Tensor  # int32, B + 1 entries
    context_lens_B: torch.Tensor  # int32, tokens to attend to, the new ones included
    block_tables_BM: torch.Tensor  # int32
    num_decodes: int
    max_query_len: int
    max_context_len: int
    # The fields below serve kernels on CUDA, where tables stay on the device with one row per running sequence.
    table_rows_B: torch.Tensor | None = None  # int32: each sequence's row of block_tables_BM; None: its index
    decode_work: DecodeWork | None = None
    prefill_tiles: torch.Tensor | None = None  # int32 [tiles, 2]: sequence and offset of its queries


@dataclass(slots=True)
class KVCache:
    """keys[layer] and values[layer] are [num_blocks, block_size, K, D]."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class FlatKernels(Protocol):
    """What a device must provide. Keys and values of a layer have one width; window 0, softcap 0 and sinks None are
    off. A sink is a score that has no value."""

    @abstractmethod
    def attend_flat(
        self,
        query: torch.Tensor,
        query_stride: int,
        num_heads: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query`: rows of query_stride numbers that begin with num_heads queries."""

    def attend(
        self,
        query_NHD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, H, D]."""
        query = query_NHD.contiguous()
        heads, dim = query.shape[1:]
        return self.attend_flat(
            query, heads * dim, heads, keys, values, batch, scale=scale, window=window, softcap=softcap,
            sinks_H=sinks_H,
        )  # fmt: skip


@dataclass(slots=True)
class PagedContext:
    batch: PagedBatch
    cache: KVCache
    kernels: FlatKernels


_ACTIVE = threading.local()


@contextmanager
def paged_context(context: PagedContext) -> Iterator[None]:
    """Attention calls of this thread use `context` until the block ends."""
    _ACTIVE.context = context
    try:
        yield
    finally:
        del _ACTIVE.context


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D].

    Other arguments change nothing: rill.models.eager has seen them when the model was loaded.
    """
    context: PagedContext = _ACTIVE.context
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = context.cache.keys[layer], context.cache.values[layer]
    value_dim = value.shape[-1]
    if value_dim < values.shape[-1]:  # narrower than keys, as in multi-head latent attention
        value = torch.nn.functional.pad(value, (0, values.shape[-1] - value_dim))
    keys.view(-1, *keys.shape[2:]).index_copy_(0, context.batch.slots_N, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, context.batch.slots_N, value[0].transpose(0, 1))
    out_NHD = context.kernels.attend(
        query[0].transpose(0, 1),
        keys,
        values,
        context.batch,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks_H=s_aux,
    )
    return out_NHD[None, ..., :value_dim], None


def register_paged_attention() -> str:
    """Make "rill_paged" known to transformers; returns the name. No mask is built for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME
