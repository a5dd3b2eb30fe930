"""Packed attention against attention of each sequence by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rill.models.train.attention_packed import packed_attention
from rill.models.train.packed_layout import Segment, build_layout

CPU = torch.device("cpu")
H, G, E = 4, 2, 8


def heads(count: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, length, E, generator=generator).requires_grad_()


def plain(q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], window: int | None = None) -> Tensor:
    """Every query by itself over the keys it may see."""
    out = torch.zeros(q.shape[2], H, E)
    k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
    for s in segments:
        prefix = list(range(s.prefix_start, s.prefix_end))
        for row in range(s.start, s.end):
            keys = prefix + list(range(s.start, row + 1))
            keys = keys if window is None else keys[-window:]
            weights = (q[0, :, row, None] * k[0, :, keys]).sum(-1).mul(E**-0.5).softmax(-1)
            out[row] = (weights[..., None] * v[0, :, keys]).sum(1)
    return out[None]


LAYOUTS = {
    "one": [(0, 7)],
    "equal": [(0, 4), (4, 8), (8, 12)],
    "mixed": [(0, 3), (3, 20), (20, 21), (21, 25), (25, 40)],
    "tree": [(0, 5), (5, 9, 0, 5), (9, 15, 0, 5), (15, 18), (18, 22, 15, 18)],
}


def segments_of(name: str) -> list[Segment]:
    return [
        Segment(start=a, end=b, prefix_start=(p or [0, 0])[0], prefix_end=(p or [0, 0])[1])
        for a, b, *p in LAYOUTS[name]
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_token_attends_across_a_boundary_forward_or_backward(name: str) -> None:
    segments = segments_of(name)
    length = segments[-1].end
    mix = torch.randn(1, length, H, E, generator=torch.Generator().manual_seed(9))
    results = []
    for is_plain in (True, False):
        q, k, v = heads(H, length, 0), heads(G, length, 1), heads(G, length, 2)
        if is_plain:
            out = plain(q, k, v, segments)
        else:
            layout = build_layout(segments, device=CPU, use_flash=False)
            out = packed_attention(torch.nn.Module(), q, k, v, None, scaling=E**-0.5, packed=layout)[0]
        (out * mix).sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["one", "mixed", "tree"])
def test_a_sliding_window_limits_how_far_a_token_sees_into_a_prefix_too(name: str) -> None:
    segments = segments_of(name)
    length = segments[-1].end
    q, k, v = heads(H, length, 0), heads(G, length, 1), heads(G, length, 2)
    layout = build_layout(segments, device=CPU, use_flash=False)
    out, _ = packed_attention(
        torch.nn.Module(), q, k, v, None, scaling=E**-0.5, packed=layout, sliding_window=4
    )
    torch.testing.assert_close(out, plain(q, k, v, segments, window=4), atol=1e-5, rtol=1e-4)
