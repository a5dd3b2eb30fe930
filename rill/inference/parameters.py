"""New weights on their way to an engine: what a model's parameters are called and how large they are, which is checked
before foreign engines see them; and weights on disk.

vLLM and SGLang accept a partial or a misnamed checkpoint silently; an Engine must not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rill.errors import RequestError, WeightSyncError

if TYPE_CHECKING:
    import torch

    from rill.inference.base import NamedTensors
    from rill.models.loading import ModelConfig

TIED_HEAD = "lm_head.weight"


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a checkpoint holds, as transformers has them: parameters and buffers such as a router's
    bias. Nothing is loaded. A tied output head is not among them."""
    from rill.models.loading import empty_model, load_model_config

    module = empty_model(load_model_config(model))
    saved = module.state_dict().keys()
    buffers = {name: tuple(b.shape) for name, b in module.named_buffers() if name in saved}
    return {name: tuple(p.shape) for name, p in module.named_parameters()} | buffers


def as_parameters(
    saved: Mapping[str, Callable[[], torch.Tensor]], model: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """What transformers makes of a checkpoint's tensors when it loads them: renamed, experts joined. One parameter in
    memory at a time."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    from rill.models.loading import empty_model, load_model_config

    module = empty_model(load_model_config(model))
    known, transforms = module.state_dict(), get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    made: dict[str, Any] = {}
    for name in sorted(saved, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, known)
        if name in known or target not in known:
            target, pattern = name, None  # what is wrong with it is told under its own name
        if target not in made:
            made[target] = WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        made[target].add_tensor(target, name, pattern or name, saved[name])
    for target, transform in made.items():
        try:
            parts = transform.convert(target, model=module, config=module.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise WeightSyncError(f"{target} cannot be made of what the checkpoint has: {error}") from error
        for name, tensor in parts.items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder or files of safetensors as a stream of (name, tensor), one tensor in memory at a time; may be iterated
    again. It crosses a process boundary as paths, so that every replica reads (and maps) the files itself."""

    shards: tuple[Path, ...]
    model: ModelConfig | None = None
    """Whose checkpoint it is, where transformers keeps parameters under other names than the model has them, such as
    experts one by one. None: the names are the model's."""

    @staticmethod
    def from_folder(folder: Path) -> Checkpoint:
        """The files that transformers would read; others may lie beside them. A missing or empty folder is the
        caller's mistake."""
        index = folder / "model.safetensors.index.json"
        try:
            shards = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
            if folder / "model.safetensors" in shards:
                shards = [folder / "model.safetensors"]
            elif shards and index.is_file():
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                shards = sorted(folder / name for name in set(listed))
        except (KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError) as error:
            raise WeightSyncError(f"{index} cannot be read: {error!r}") from error
        except (OSError, ValueError):  # a path with a null byte, or one we may not read
            shards = []
        if not shards:
            raise RequestError(f"there is no folder {str(folder)[:512]!r} with *.safetensors files in it")
        return Checkpoint(tuple(shards))

    @staticmethod
    def write(tensors: NamedTensors, path: Path) -> Checkpoint:
        """Spill tensors into one file. Tied tensors are written once each: names matter, not storage."""
        from safetensors.torch import save_file

        save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors}, path)
        return Checkpoint((path,))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes from the files' headers; a file that is cut off is found out too. Needs torch for a `model`
        only."""
        found: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            with _opened(shard, "np") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if self.model is None:
            return found
        import torch

        empty = {name: partial(torch.empty, shape, device="meta") for name, shape in found.items()}
        return {name: tuple(tensor.shape) for name, tensor in as_parameters(empty, self.model)}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.model is None:
            for shard in self.shards:
                with _opened(shard, "pt") as file:
                    yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            return
        with ExitStack() as held:
            files = [held.enter_context(_opened(shard, "pt")) for shard in self.shards]
            saved = {name: partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118
            yield from as_parameters(saved, self.model)


def _opened(shard: Path, framework: str) -> Any:
    """Its header is read, and tells whether it is whole."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(shard, framework=framework)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{shard} cannot be read: {error}") from error
