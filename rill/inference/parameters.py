"""What a model's parameters are called and how large they are: the check that new weights pass before foreign engines.

vLLM and SGLang accept a partial or a misnamed checkpoint silently; an Engine must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rill.errors import WeightSyncError
from rill.models.loading import ModelConfig, empty_model, load_model_config

if TYPE_CHECKING:
    import torch

    from rill.inference.base import NamedTensors

TIED_HEAD = "lm_head.weight"


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a checkpoint holds, as transformers has them: parameters and buffers such as a router's
    bias. Nothing is loaded. A tied output head is not among them."""
    module = empty_model(load_model_config(model))
    saved = module.state_dict().keys()
    buffers = {name: tuple(b.shape) for name, b in module.named_buffers() if name in saved}
    return {name: tuple(p.shape) for name, p in module.named_parameters()} | buffers


def checked(
    tensors: NamedTensors, expected: Mapping[str, tuple[int, ...]], *, partial: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; a WeightSyncError at the first wrong name or shape, and at the end if some are missing."""
    missing = set(expected)
    for name, tensor in tensors:
        if _is_wanted(name, tuple(tensor.shape), expected):
            missing.discard(name)
            yield name, tensor
    _refuse_missing(missing, partial)


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, partial: bool = False
) -> None:
    """The same check of names and shapes alone, before a tensor has been read."""
    missing = set(expected) - {name for name, shape in shapes.items() if _is_wanted(name, shape, expected)}
    _refuse_missing(missing, partial)


def _is_wanted(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> bool:
    if name == TIED_HEAD and name not in expected:
        return False  # the embedding brings it
    if name not in expected:
        raise WeightSyncError(f"there is no parameter {name!r}")
    if shape != expected[name]:
        raise WeightSyncError(f"{name} has shape {shape}, expected {expected[name]}")
    return True


def _refuse_missing(missing: set[str], partial: bool) -> None:
    if missing and not partial:
        raise WeightSyncError(f"{len(missing)} parameters are missing, among them {min(missing)}")
