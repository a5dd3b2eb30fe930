"""Attention over packed segments in Triton against the plain formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rill.models.train.attention_packed import packed_attention
from rill.models.train.packed_layout import Segment, build_layout


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, int]], window: int) -> Tensor:
    """float32, one segment of (queries, keys) at a time; [Q, H, E]."""
    outputs, q_at, k_at = [], 0, 0
    for queries, keys in lengths:
        part = [x[at : at + n].float() for x, at, n in ((q, q_at, queries), (k, k_at, keys), (v, k_at, keys))]
        repeats = q.shape[1] // k.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in part[1:])
        distance = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).to(q.device)
        hidden = (distance < 0) | (distance >= window if window else False)
        scores = torch.einsum("qhe,khe->hqk", part[0], key) * q.shape[2] ** -0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khe->qhe", weights, value))
        q_at, k_at = q_at + queries, k_at + keys
    return torch.cat(outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "lengths"),
    [
        (12, 2, 128, [(1, 1), (130, 130), (700, 700), (7, 7), (256, 256)]),
        (4, 4, 64, [(300, 300), (65, 65)]),
        (6, 1, 32, [(50, 200), (129, 129), (3, 300)]),
    ],
    ids=["grouped", "plain", "prefixes"],
)
def test_it_is_the_formula_forward_and_backward(
    heads: int, kv_heads: int, width: int, lengths: list[tuple[int, int]], window: int
) -> None:
    from rill.models.ops.triton_segments import plan_tiles

    torch.manual_seed(0)
    num_queries, num_keys = (sum(n[i] for n in lengths) for i in (0, 1))
    q, k, v = (
        torch.randn(n, h, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, h in ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads))
    )
    tiles = [torch.from_numpy(t).cuda() for t in plan_tiles(*zip(*lengths, strict=True))]
    out, _ = torch.ops.rill.segment_attention(q, k, v, *tiles, width**-0.5, window)
    wanted = plain(q, k, v, lengths, window)
    grad = torch.randn_like(out)
    found_grads = torch.autograd.grad(out, (q, k, v), grad)
    wanted_grads = torch.autograd.grad(wanted, (q, k, v), grad.float())
    for a, b in zip((out, *found_grads), (wanted, *wanted_grads), strict=True):
        assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()


@pytest.mark.gpu
def test_a_packed_row_takes_this_route_and_prefixes_are_seen() -> None:
    torch.manual_seed(0)
    segments = [
        Segment(start=0, end=40),
        Segment(start=40, end=90, prefix_start=0, prefix_end=40),
        Segment(start=90, end=128, prefix_start=0, prefix_end=40),
    ]
    device = torch.device("cuda")
    q, k, v = (torch.randn(1, h, 128, 64, device="cuda") for h in (4, 2, 2))
    fast = build_layout(segments, device=device, use_flash=True)
    assert fast.query_tiles is not None
    found, _ = packed_attention(torch.nn.Identity(), *(x.bfloat16() for x in (q, k, v)), None, packed=fast)
    exact = build_layout(segments, device=device, use_flash=False)
    wanted, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packed=exact)
    assert (found.float() - wanted).norm() < 0.01 * wanted.norm()


def test_tiles_cover_every_query_and_key_once_dearest_first() -> None:
    pytest.importorskip("triton")
    from rill.models.ops.triton_segments import KEY_TILE, QUERY_TILE, plan_tiles

    queries, keys = [1, 300, 128, 129], [1, 340, 128, 500]
    for tiles, lengths, size, start in zip(
        plan_tiles(queries, keys), (queries, keys), (QUERY_TILE, KEY_TILE), (0, 2), strict=True
    ):
        covered = np.concatenate(
            [
                np.arange(t[start] + t[5] * size, t[start] + min(t[start + 1], (t[5] + 1) * size))
                for t in tiles
            ]
        )
        assert sorted(covered.tolist()) == list(range(sum(lengths)))
