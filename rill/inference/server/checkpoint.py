"""A folder of safetensors as a stream of named tensors, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rill.errors import RequestError, WeightSyncError

if TYPE_CHECKING:
    import torch


def find_shards(folder: Path) -> list[Path]:
    """The folder's safetensors files. A missing or empty folder is the caller's mistake."""
    try:
        shards = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    except (OSError, ValueError):  # a path with a null byte, or one we may not read
        shards = []
    if not shards:
        raise RequestError(f"there is no folder {str(folder)[:512]!r} with *.safetensors files in it")
    return shards


def read_tensors(shards: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{shard} cannot be read: {error}") from error
