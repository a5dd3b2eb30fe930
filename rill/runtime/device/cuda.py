"""NVIDIA GPUs, as an accelerator: shown by CUDA_VISIBLE_DEVICES, joined by NCCL, shared by CUDA IPC.

The one file in the runtime that calls torch's CUDA. torch enters when a method needs it; counting does not load CUDA.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rill.errors import UnsupportedError
from rill.runtime.device.accelerator import Accelerator

_DEVICE_ARGUMENT = 6
"""The place of the device's number in the arguments of torch's rebuild_cuda_tensor."""


class Cuda(Accelerator):
    visible_env = "CUDA_VISIBLE_DEVICES"
    torch_name = "cuda"
    collective_backend = "nccl"
    has_ipc = True

    def devices(self) -> Sequence[int]:
        visible = os.environ.get(self.visible_env)
        if visible is not None and all(part.strip().isdigit() for part in visible.split(",")):
            return [int(part) for part in visible.split(",")]
        if visible == "":
            return []
        folder = Path("/proc/driver/nvidia/gpus")
        if folder.is_dir():
            return range(sum(1 for _ in folder.iterdir()))
        return range(sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")))

    def memory_bytes(self, device: str) -> tuple[int, int]:
        free, total = _torch().cuda.mem_get_info(device)
        return int(free), int(total)

    def held_bytes(self, device: str) -> tuple[int, int]:
        if "torch" not in sys.modules or not _torch().cuda.is_initialized():
            return 0, 0  # asking would take memory of it
        held, (free, _) = int(_torch().cuda.memory_reserved(device)), self.memory_bytes(device)
        return held, held + free

    def synchronize(self, device: Any) -> None:
        _torch().cuda.current_stream(device).synchronize()

    def export(self, tensor: Any) -> Any:
        """The GPU goes by its UUID: processes number the GPUs that they see in their own ways."""
        _, arguments = _reductions().reduce_tensor(tensor)
        return _uuid(tensor.device.index), arguments

    def open(self, handle: Any) -> Any:
        uuid, arguments = handle
        seen = {_uuid(index): index for index in range(_torch().cuda.device_count())}
        if uuid not in seen:
            raise UnsupportedError(
                f"memory on GPU {uuid} cannot be opened here: this process sees {', '.join(seen) or 'no GPU'}; "
                "place both ends on one GPU"
            )
        here = (*arguments[:_DEVICE_ARGUMENT], seen[uuid], *arguments[_DEVICE_ARGUMENT + 1 :])
        return _reductions().rebuild_cuda_tensor(*here)


@cache
def _uuid(index: int) -> str:
    return str(_torch().cuda.get_device_properties(index).uuid)


def _torch() -> Any:
    return importlib.import_module("torch")


def _reductions() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions")
