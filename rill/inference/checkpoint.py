"""Weights on disk: a folder or files of safetensors as a stream of named tensors, one tensor in memory at a time.

A Checkpoint crosses a process boundary as paths, so that every replica reads (and maps) the files itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rill.errors import RequestError, WeightSyncError

if TYPE_CHECKING:
    import torch

    from rill.inference.base import NamedTensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Iterates over (name, tensor); may be iterated again."""

    shards: tuple[Path, ...]

    @staticmethod
    def from_folder(folder: Path) -> Checkpoint:
        """A missing or empty folder is the caller's mistake."""
        try:
            shards = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
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
