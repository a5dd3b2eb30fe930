"""The one door to Triton, with an error in words where it is missing."""

from __future__ import annotations

import torch

from rill.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "the CUDA engine needs Triton, which comes with torch's CUDA builds: install torch for CUDA"
    ) from error

__all__ = ["precision", "tl", "triton"]


def precision(dtype: torch.dtype) -> str:
    """For tl.dot: float32 is computed as such, and not in tf32."""
    return "ieee" if dtype is torch.float32 else "tf32"
