"""How an object becomes bytes: a small pickle header and the raw buffers beside it. Calls, sends and channels share it.

`encode` gives views of the caller's own memory, `decode` builds objects on the memory it is given: no copy. NumPy
arrays and torch tensors from RAW_MIN_BYTES up leave the pickle raw; smaller ones cost less inside the header.

Rules for tensors:
- values travel, autograd does not; a `Parameter` stays a `Parameter` with its flag;
- only the elements travel: of a slice the slice; two views of one storage arrive as two tensors;
- a tensor goes through `device_hook` if there is one; where that declines, one that is not on the CPU is copied to
  the host, and `decode` puts it on `device`, or leaves it on the CPU when none is given;
- tensors decoded from read-only buffers are copies; from writable buffers they share the buffer's memory.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

from rill.errors import UnpicklableError

RAW_MIN_BYTES = 4096
"""Buffers below this size stay inside the header."""

Buffer: TypeAlias = memoryview
DeviceHook: TypeAlias = Callable[[Any], "tuple[Callable[..., Any], tuple[Any, ...]] | None"]
"""Turns a tensor into (a picklable function, its arguments) that rebuilds it; None: it travels through the host."""


class Encoded(NamedTuple):
    """An object ready to travel. The buffers are views: keep this alive until they are sent."""

    header: bytes
    buffers: list[Buffer]

    @property
    def num_bytes(self) -> int:
        """Header and buffers together."""
        return len(self.header) + sum(map(len, self.buffers))


def encode(obj: object, *, device_hook: DeviceHook | None = None) -> Encoded:
    """Take `obj` apart without copying its large buffers. UnpicklableError names the path to the culprit."""
    try:
        return Encoded(*_dump(obj, device_hook))
    except _PICKLE_ERRORS as error:
        raise UnpicklableError(_explain(obj, error)) from error


def decode(header: bytes | memoryview, buffers: Sequence[Any], *, device: str | None = None) -> Any:
    """Rebuild the object on `buffers`, in the order that `encode` gave them."""
    if device is None and decoding_device.get() is None:
        return pickle.loads(header, buffers=buffers)
    before = decoding_device.set(device)
    try:
        return pickle.loads(header, buffers=buffers)
    finally:
        decoding_device.reset(before)


class _TorchPickler(pickle.Pickler):
    """Used once torch is imported in this process; before that no tensor can be in the object."""

    device_hook: DeviceHook | None = None

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        return _reduce_tensor(torch, obj, self.device_hook)


def _dump(obj: object, device_hook: DeviceHook | None) -> tuple[bytes, list[Buffer]]:
    buffers: list[Buffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        """The pickler's buffer_callback: true keeps the buffer inside the pickle."""
        view = buffer.raw()
        if view.nbytes < RAW_MIN_BYTES:
            return True
        buffers.append(view)
        return False

    if "torch" not in sys.modules:
        return pickle.dumps(obj, protocol=5, buffer_callback=keep_inside), buffers
    file = io.BytesIO()
    pickler = _TorchPickler(file, protocol=5, buffer_callback=keep_inside)
    pickler.device_hook = device_hook
    pickler.dump(obj)
    return file.getvalue(), buffers


def _reduce_tensor(torch: Any, tensor: Any, device_hook: DeviceHook | None) -> Any:
    if type(tensor) is not torch.Tensor:
        return NotImplemented  # Parameter, DTensor and other subclasses know best how they are rebuilt
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return NotImplemented
    values = tensor.detach()
    exported = device_hook(values) if device_hook is not None else None
    if exported is not None:
        return exported
    was_on_cpu = tensor.device.type == "cpu"
    values = values.resolve_conj().resolve_neg().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy()
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    return _rebuild_tensor, (pickle.PickleBuffer(raw), dtype_name, tuple(tensor.shape), was_on_cpu)


decoding_device: ContextVar[str | None] = ContextVar("rill-decoding-device", default=None)
"""Where the decode that runs here puts tensors that were not on the CPU; None: on the CPU."""


def _rebuild_tensor(raw: Any, dtype_name: str, shape: tuple[int, ...], was_on_cpu: bool) -> Any:
    import torch

    dtype = getattr(torch, dtype_name)
    view = memoryview(raw)
    if view.nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        own = bytearray(view) if view.readonly else raw
        tensor = torch.frombuffer(own, dtype=torch.uint8).view(dtype).view(shape)
    device = decoding_device.get()
    return tensor if was_on_cpu or device is None else tensor.to(device)


_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, BufferError)


def _explain(obj: object, error: Exception) -> str:
    path, culprit, reason = _find_culprit(obj, "object", error, depth=0)
    what = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    hint = "move it to the top level of a module" if _is_local_name(culprit) else "send plain data instead"
    return f"{path} ({what}) cannot travel between processes: {reason}; {hint}, or give its class __reduce__"


def _find_culprit(obj: object, path: str, error: Exception, depth: int) -> tuple[str, object, Exception]:
    """The deepest part of `obj` that fails by itself."""
    if depth < 50:
        for step, part in _parts_of(obj):
            try:
                _dump(part, None)
            except _PICKLE_ERRORS as part_error:
                return _find_culprit(part, path + step, part_error, depth + 1)
    return path, obj, error


def _parts_of(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f" key {key!r}", key
            yield f"[{key!r}]", value
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif is_dataclass(obj) and not isinstance(obj, type):
        for field in fields(obj):
            yield f".{field.name}", getattr(obj, field.name)
    elif not isinstance(obj, type) and hasattr(obj, "__dict__"):
        for name, value in vars(obj).items():
            yield f".{name}", value


def _is_local_name(obj: object) -> bool:
    name = obj.__qualname__ if hasattr(obj, "__qualname__") else type(obj).__qualname__
    return "<locals>" in name or "<lambda>" in name
