"""Tensors in buckets: which go together, where each lies, how they are copied in, and whether all are finite: a NaN or
an infinity that reached the engines would end the run, unexplained. Called by publishers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from rill.weights.manifest import TensorSpec

ALIGNMENT = 64
"""Tensors start at multiples of this inside a bucket, so that any dtype can be viewed in place."""

NamedTensors = Iterable[tuple[str, Tensor]]

_INFINITY_BITS: dict[torch.dtype, tuple[str, int]] = {
    torch.bfloat16: ("16", 0x7F80),
    torch.float16: ("16", 0x7C00),
    torch.float32: ("32", 0x7F80_0000),
    torch.float64: ("64", 0x7FF0_0000_0000_0000),
}


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered where it is sharded (FSDP, tensor-parallel): one at a time, so that no rank holds a
    second copy of the model. Collective: every rank of the mesh must call it."""
    if type(tensor) in (Tensor, Parameter):
        return tensor  # also spares runs without sharding the import below, which takes seconds
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        whole = tensor.full_tensor()
        assert isinstance(whole, Tensor)
        return whole
    return tensor


def plan_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors as they come, without holding more than one bucket of them. One device to a bucket."""
    members: list[tuple[str, Tensor]] = []
    size = 0
    for name, given in named_tensors:
        tensor = full_tensor(given).detach()
        num_bytes = _aligned(tensor.numel() * tensor.element_size())
        if members and (size + num_bytes > bucket_bytes or members[0][1].device != tensor.device):
            yield members
            members, size = [], 0
        members.append((name, tensor))
        size += num_bytes
    if members:
        yield members


def layout(members: list[tuple[str, Tensor]], bucket: int) -> tuple[list[TensorSpec], int]:
    specs, offset = [], 0
    for name, tensor in members:
        num_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype,
                bucket=bucket,
                offset=offset,
                num_bytes=num_bytes,
            )
        )
        offset += _aligned(num_bytes)
    return specs, offset


def fill(
    buffer_B: Tensor, members: list[tuple[str, Tensor]], specs: list[TensorSpec], views: list[Tensor]
) -> None:
    """Copy the tensors to their places and zero the gaps, so that equal weights have equal checksums."""
    torch._foreach_copy_(views, [tensor for _, tensor in members])
    for spec in specs:
        end, padded_end = spec.offset + spec.num_bytes, spec.offset + _aligned(spec.num_bytes)
        if end < padded_end:
            buffer_B[end:padded_end].zero_()


def start_all_finite(buffer_B: Tensor, members: list[tuple[str, Tensor]]) -> Callable[[], bool]:
    """Over the filled buffer at once where all its tensors are of one kind; gaps are zero, which is finite."""
    tensors = [tensor for _, tensor in members if tensor.is_floating_point()]
    if buffer_B.is_cuda and len(tensors) == len(members) and len({t.dtype for t in tensors}) == 1:
        return start_is_finite(buffer_B.view(tensors[0].dtype))
    started = [start_is_finite(tensor) for tensor in tensors]
    return lambda: all(are_finite() for are_finite in started)


def view_of(buffer_B: Tensor, spec: TensorSpec) -> Tensor:
    return buffer_B[spec.offset : spec.offset + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)


def views_of(buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
    return [view_of(buffer_B, spec) for spec in specs]


class ViewCache:
    """Views into buffers that serve one version after the other: making hundreds of them takes milliseconds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[TensorSpec], list[Tensor]]] = {}

    def __call__(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        specs_before, views = self._known.get(buffer_B.data_ptr(), ([], []))
        if specs_before != specs:
            views = views_of(buffer_B, specs)
            self._known[buffer_B.data_ptr()] = (specs, views)
        return views

    def clear(self) -> None:
        self._known.clear()


def _aligned(num_bytes: int) -> int:
    return max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)


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
