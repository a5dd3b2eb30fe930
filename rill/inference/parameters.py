"""New weights on their way to an engine: what a model's parameters are called and how large they are, which is checked
before foreign engines see them; and weights on disk.

vLLM and SGLang accept a partial or a misnamed checkpoint silently; an Engine must not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rill.errors import RequestError, WeightSyncError

if TYPE_CHECKING:
    import torch

    from rill.inference.base import NamedTensors
    from rill.models.loading import ModelConfig

T = TypeVar("T")

TIED_HEAD = "lm_head.weight"


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a checkpoint holds, as transformers has them: parameters and buffers such as a router's
    bias. Nothing is loaded. A tied output head is not among them."""
    from rill.models.loading import empty_model, load_model_config

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder or files of safetensors as a stream of (name, tensor), one tensor in memory at a time; may be iterated
    again. It crosses a process boundary as paths, so that every replica reads (and maps) the files itself."""

    shards: tuple[Path, ...]

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
        """Names and shapes from the files' headers; a file that is cut off is found out too. Needs no torch."""
        return dict(self._read("np", lambda file, name: tuple(file.get_slice(name).get_shape())))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._read("pt", lambda file, name: file.get_tensor(name))

    def _read(self, framework: str, take: Callable[[Any, str], T]) -> Iterator[tuple[str, T]]:
        from safetensors import SafetensorError, safe_open

        for shard in self.shards:
            try:
                with safe_open(shard, framework=framework) as file:
                    for name in file.keys():  # noqa: SIM118
                        yield name, take(file, name)
            except (OSError, SafetensorError) as error:
                raise WeightSyncError(f"{shard} cannot be read: {error}") from error
