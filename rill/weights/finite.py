"""Whether weights are numbers: a NaN or an infinity that reached the engines would end the run, unexplained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_INFINITY_BITS: dict[torch.dtype, tuple[str, int]] = {
    torch.bfloat16: ("16", 0x7F80),
    torch.float16: ("16", 0x7C00),
    torch.float32: ("32", 0x7F80_0000),
    torch.float64: ("64", 0x7FF0_0000_0000_0000),
}


def is_finite(tensor: Tensor) -> bool:
    return start_is_finite(tensor)()


def start_is_finite(tensor: Tensor) -> Callable[[], bool]:
    """is_finite(), begun; the call that it returns waits for the answer.

    Without a temporary. On a CPU by the bits: infinity and NaN are the largest numbers of their sign when read
    as integers, and an integer maximum runs at the speed of memory where a float one does not.
    """
    if tensor.numel() == 0:
        return lambda: True
    if tensor.device.type == "cpu" and tensor.dtype in _INFINITY_BITS and tensor.is_contiguous():
        width, infinity = _INFINITY_BITS[tensor.dtype]
        bits = tensor.reshape(-1).view(getattr(torch, f"int{width}")).numpy()
        sign = 1 << (int(width) - 1)
        answer = bool(bits.max() < infinity) and int(bits.view(f"uint{width}").max()) < (sign | infinity)
        return lambda: answer
    if tensor.is_cuda and tensor.dtype.itemsize == 2:
        # A sum in float32 is the fastest pass there is, and keeps any NaN or infinity. Finite numbers would have to be
        # absurdly large to make it overflow; then each is looked at.
        total = tensor.sum(dtype=torch.float32)
        return lambda: bool(torch.isfinite(total)) or _are_all_finite(tensor)
    if tensor.dtype.itemsize == 1:  # 8-bit floats have no minimum kernel
        return lambda: _are_all_finite(tensor.to(torch.float32))
    low, high = torch.aminmax(tensor)
    are_all = torch.isfinite(low) & torch.isfinite(high)
    return lambda: bool(are_all)


def _are_all_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
