"""Activation recomputation: a decoder layer whose backward pass computes what its forward pass did not keep.

Callers: TrainEngine. Names in the state dict do not change; without gradients the layer runs as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

_KEEP_OPS = (
    "aten::mm",
    "aten::addmm",
    "rill::product_fp8",
    "aten::_flash_attention_forward",
    "rill::segment_attention",
    "rill::gated_mlp",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
)


def recompute_layer(layer: nn.Module, mode: Literal["selective", "full"]) -> None:
    """Replace the layer's forward. `full` keeps its inputs only; `selective` also matrix products and attention."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().split(".")[0]
        return CheckpointPolicy.MUST_SAVE if name in _KEEP_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep)
    forward: Callable[..., Any] = layer.forward

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    layer.forward = recomputing
