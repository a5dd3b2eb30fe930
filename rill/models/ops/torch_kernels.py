"""Every operation of a decoder in plain torch: the reference for the compiled ones, and what runs without a compiler.

`TorchKernels` offers the calls of rill.models.ops.cpu_kernels and rill.models.ops.triton_kernels on any device.

Axes: N token of the flat batch, B sequence, Q query of one sequence, T key, H query head, K key/value head, D head
dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rill.models.decode.attention_paged import CacheRows, LayerCache, PagedBatch
from rill.models.decode.structure import HeadNorms, Norm
from rill.models.eager import ScoreRule
from rill.models.train.products import linear

GATHER_BYTES = 64 << 20
"""Of keys, that single tokens attend to at one time: rows are gathered from their blocks and padded."""


class TorchKernels:
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, in 16 bits on the CPU as a trainer computes it there."""
        return linear(x, weight, bias)

    def add_norm(self, hidden: Tensor, addend: Tensor | None, norm: Norm) -> Tensor:
        if addend is not None:
            hidden += addend
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        if norm.is_offset:
            return (x * (1.0 + norm.weight.float())).to(hidden.dtype)
        return x.to(hidden.dtype) * norm.weight

    def act_mul(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
        return act * up

    def rope_store(self, qkv: Tensor, rows: CacheRows, num_heads: int, norms: HeadNorms | None) -> None:
        kv_heads, dim = rows.keys.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.add_norm(q, None, norms.query), self.add_norm(k, None, norms.key)
        turn = (rows.cos[rows.positions_N][:, None], rows.sin[rows.positions_N][:, None])
        heads[:, :num_heads] = _turned(q, *turn)
        rows.keys.view(-1, kv_heads, dim)[rows.slots_N] = _turned(k, *turn)
        rows.values.view(-1, kv_heads, dim)[rows.slots_N] = v

    def attend(
        self, query_NW: Tensor, num_heads: int, cache: LayerCache, batch: PagedBatch, rule: ScoreRule
    ) -> Tensor:
        keys, values = cache
        block_size, dim = keys.shape[1], keys.shape[3]
        query_NHD = query_NW.view(len(query_NW), -1, dim)[:, :num_heads].contiguous()
        out = torch.empty_like(query_NHD)
        starts, lengths = batch.query_starts_B1.tolist(), batch.context_lens_B.tolist()
        for begin, end in _runs(lengths, batch.num_decodes, keys[0, 0].numel() * keys.element_size()):
            first, last = starts[begin], starts[end]
            if last > first:
                table = batch.block_tables_BM[begin:end, : -(-max(lengths[begin:end]) // block_size)].long()
                k, v = keys[table].flatten(1, 2), values[table].flatten(1, 2)
                query_BQHD = query_NHD[first:last].view(end - begin, -1, num_heads, dim)
                context = batch.context_lens_B[begin:end].long()
                out[first:last] = _attend(query_BQHD, k, v, context, rule).flatten(0, 1)
        return out


def _attend(
    query_BQHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, context_B: Tensor, rule: ScoreRule
) -> Tensor:
    """Of sequences with context_B tokens each, of which the queries are the last; softmax in float32:

    out[q] = Σ_t softmax_t(cap(scale · q·k_t)) v_t  over  max(0, p − window + 1) ≤ t ≤ p,  p = context − Q + q.
    """
    scale, window, softcap, sinks_H = rule
    num_queries, num_heads = query_BQHD.shape[1:3]
    repeats = num_heads // key_BTKD.shape[2]
    query = query_BQHD.float().view(*query_BQHD.shape[:2], -1, repeats, query_BQHD.shape[3])
    score = torch.einsum("bqkgd,btkd->bkgqt", query, key_BTKD.float()) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    device = query.device
    at_BQ = context_B[:, None] - num_queries + torch.arange(num_queries, device=device)
    at_T = torch.arange(key_BTKD.shape[1], device=device)
    hidden_BQT = at_T > at_BQ[..., None]
    if window:
        hidden_BQT = hidden_BQT | (at_T <= at_BQ[..., None] - window)
    score = score.masked_fill(hidden_BQT[:, None, None], float("-inf"))
    if sinks_H is not None:
        sink = sinks_H.float().view(-1, repeats)[None, :, :, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat((score, sink), dim=-1)
    share = score.softmax(dim=-1)[..., : key_BTKD.shape[1]]
    out = torch.einsum("bkgqt,btkd->bqkgd", share, value_BTKD.float())
    return out.flatten(2, 3).to(query_BQHD.dtype)


def _runs(lengths: list[int], num_decodes: int, token_bytes: int) -> list[tuple[int, int]]:
    """[begin, end) of rows that are attended together: prompts alone, single tokens so many as GATHER_BYTES allow."""
    runs: list[tuple[int, int]] = []
    begin = longest = 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > begin and (row >= num_decodes or (row + 1 - begin) * longest * token_bytes > GATHER_BYTES):
            runs.append((begin, row))
            begin, longest = row, length
    return [*runs, (begin, len(lengths))] if lengths else runs


def _turned(x_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos + torch.cat((-second, first), dim=-1) * sin
