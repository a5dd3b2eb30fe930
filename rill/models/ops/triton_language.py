"""The one door to Triton, with an error in words where it is missing."""

from __future__ import annotations

import functools

import torch

from rill.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "the CUDA engine needs Triton, which comes with torch's CUDA builds: install torch for CUDA"
    ) from error

__all__ = ["await_inputs", "await_inputs_alone", "early_launch", "power_of_2", "precision", "tl", "triton"]


def power_of_2(n: int) -> int:
    """The smallest that is not below n. Triton's own can be called in kernels too and costs the host microseconds."""
    return 1 << (n - 1).bit_length()


def precision(dtype: torch.dtype) -> str:
    """For tl.dot: float32 is computed as such, and not in tf32."""
    return "ieee" if dtype is torch.float32 else "tf32"


@triton.jit
def await_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start its launch, then wait until everything before this kernel has been written.

    Every kernel launched with early_launch() calls this before it reads what others wrote or writes anything, so a
    chain of them is ordered like one of ordinary launches; only what lies before it (weights, work lists) may overlap.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_inputs_alone(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """As await_inputs, and only then the next kernel starts: what lies before this one is written for all that follow,
    so they may read it early."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that calls await_inputs(): from Hopper on its launch overlaps the end of the one before."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
