"""Every operation of a decoder in plain torch: the reference for the compiled ones, and what runs without a compiler.

`TorchKernels` offers the calls of rill.models.ops.cpu_kernels and rill.models.ops.triton_kernels on any device.

Axes: N token of the flat batch, B or b sequence, q its query, k its key, H query head, K or G key/value head, D or E
head dimension.
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

    def embed(self, ids_N: Tensor, weight_VE: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids_N, weight_VE)

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
        keys = cache.keys
        block_size, dim = keys.shape[1], keys.shape[3]
        query_NHD = query_NW.view(len(query_NW), -1, dim)[:, :num_heads].contiguous()
        out = torch.empty_like(query_NHD)
        starts, lengths = batch.query_starts_B1.tolist(), batch.context_lens_B.tolist()
        for begin, end in _runs(lengths, batch.num_decodes, keys[0, 0].numel() * keys.element_size()):
            first, last = starts[begin], starts[end]
            if last > first:
                table = batch.block_tables_BM[begin:end, : -(-max(lengths[begin:end]) // block_size)].long()
                k, v = (x[table].flatten(1, 2).float().transpose(1, 2) for x in cache)
                q = query_NHD[first:last].view(end - begin, -1, num_heads, dim).float().transpose(1, 2)
                seen = _seen(batch.context_lens_B[begin:end].long(), q.shape[2], k.shape[2], rule.window)
                out[first:last] = attend(q, k, v, seen, rule).transpose(1, 2).flatten(0, 1)
        return out


def attend(
    query_bHqE: Tensor, key_bGkE: Tensor, value_bGkE: Tensor, seen_b1qk: Tensor, rule: ScoreRule
) -> Tensor:
    """[b, H, q, E] = Σ_k softmax_k(cap(scale · q·k)) v_k over the keys that are seen, where a sink takes its part of
    the sum. The softmax is in float32; all scores [b, H, q, k] are there at one time."""
    size, num_kv_heads, num_keys, dim = key_bGkE.shape
    query = query_bHqE.view(size, num_kv_heads, -1, query_bHqE.shape[2], dim)
    score = torch.einsum("bgrqe,bgke->bgrqk", query, key_bGkE).float() * rule.scale
    if rule.softcap:
        score = torch.tanh(score / rule.softcap) * rule.softcap
    score = score.masked_fill(~seen_b1qk[:, :, None], float("-inf"))
    if rule.sinks_H is not None:
        sink = rule.sinks_H.float().view(1, num_kv_heads, -1, 1, 1).expand(*score.shape[:-1], 1)
        score = torch.cat((score, sink), dim=-1)
    share = score.softmax(-1)[..., :num_keys]
    return torch.einsum("bgrqk,bgke->bgrqe", share.to(value_bGkE.dtype), value_bGkE).flatten(1, 2)


def _seen(context_B: Tensor, num_queries: int, num_keys: int, window: int) -> Tensor:
    """bool [B, 1, q, k]: the queries are the last of context_B tokens each, and see those up to themselves."""
    at_q, at_k = (torch.arange(n, device=context_B.device) for n in (num_queries, num_keys))
    at_Bq1 = (context_B[:, None] - num_queries + at_q)[..., None]
    seen_Bqk = at_k <= at_Bq1
    if window:
        seen_Bqk &= at_k > at_Bq1 - window
    return seen_Bqk[:, None]


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
