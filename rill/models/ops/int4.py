"""Weights in 4 bits: GROUP numbers that follow one another in a row share a scale, and each is -7 … 7 times it.

    w ≈ code · scale,  scale = max |w| / 7 over the group

What a weight becomes depends on nothing but its own numbers, so an engine that rounds weights as they arrive and a
trainer that multiplies with rounded ones (rill.models.train.products) compute with the same; where layers are compiled,
up to the last bit of a division.

Called by rill.models.decode.quantized and rill.training. Axes: N output, K input, G group.
"""

from __future__ import annotations

from torch import Tensor, nn

from rill.errors import UnsupportedError

GROUP = 32
LARGEST = 7.0
LEAST_SCALE = 1e-12
"""Of a group of nothing but zeros."""


def rounded_int4(weight_NK: Tensor) -> Tensor:
    """As 4 bits and the scales of its groups hold it, in the weight's own precision."""
    groups = weight_NK.float().view(*weight_NK.shape[:-1], -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    codes = (groups / scales).round().clamp(-LARGEST, LARGEST)
    return (codes * scales).view_as(weight_NK).to(weight_NK.dtype)


def check_groups(weights: list[Tensor] | list[nn.Parameter]) -> None:
    wrong = next((tuple(w.shape) for w in weights if w.shape[-1] % GROUP), None)
    if wrong:
        raise UnsupportedError(f"int4 needs inputs in groups of {GROUP}, and a weight is {wrong}")
