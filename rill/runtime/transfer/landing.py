"""Where the object that a thread opens is to land, when the receiver brought memory for it (`recv(into=...)`).

GPU tensors are then copied, or received by NCCL, straight into that memory: no second tensor of their size is made.
What comes by way of the host is built in shared memory and copied out of it, which is the same one copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Landing(threading.local):
    into: Any = None


_landing = _Landing()


@contextmanager
def landing_in(into: Any) -> Iterator[None]:
    """Let the tensor that is opened inside land in `into`, an array or a tensor."""
    _landing.into = into
    try:
        yield
    finally:
        _landing.into = None


def landing_for(tensor: Any) -> Any | None:
    """The memory that was brought for a tensor like this one; it is given out once."""
    into = _landing.into
    if not _is_gpu_tensor(into) or into.shape != tensor.shape or into.dtype != tensor.dtype:
        return None
    _landing.into = None
    return into


def landing_for_bytes(sizes: list[int], device: str) -> Any | None:
    """The same memory as plain bytes, if it is on `device` and exactly one part of that size is on its way."""
    into = _landing.into
    is_fit = hasattr(into, "untyped_storage") and into.is_contiguous() and sizes == [into.nbytes]
    if not is_fit or into.device.type != device.partition(":")[0]:
        return None
    _landing.into = None
    import torch

    return into.detach().reshape(-1).view(torch.uint8)


def _is_gpu_tensor(into: Any) -> bool:
    return hasattr(into, "is_cuda") and bool(into.is_cuda)
