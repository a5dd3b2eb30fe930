"""How an object becomes bytes: a small pickle header and the raw buffers beside it.

Owns the format that calls, transfers and channels share. Nothing here knows where the bytes go: `encode`
gives views of the caller's own memory (no copy), `decode` builds objects on the memory it is given (no copy).

What leaves the pickle raw: NumPy arrays, torch tensors of any dtype, bytes, bytearray and str, each from
`RAW_MIN_BYTES` up; smaller ones stay inside the header, where they cost less than a frame of their own.

Rules for tensors:
- values travel, autograd does not: a tensor arrives detached and without `requires_grad`; a `Parameter` stays
  a `Parameter` with its flag;
- only the elements travel: a slice of a large tensor sends the slice, and two views of one storage arrive as
  two tensors (the same tensor twice arrives as one);
- a tensor goes through `device_hook` if there is one; where that declines, one that is not on the CPU is copied to
  the host, and `decode` puts it on `device`, or leaves it on the CPU when none is given;
- tensors decoded from read-only buffers are copies; from writable buffers they share the buffer's memory.
"""

from __future__ import annotations

import pickle
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

from rill.errors import UnpicklableError

RAW_MIN_BYTES = 4096
"""Buffers below this size stay inside the header."""

Buffer: TypeAlias = memoryview
DeviceHook: TypeAlias = Callable[[Any], "tuple[Callable[..., Any], tuple[Any, ...]] | None"]
"""Turns a tensor into (a picklable function, its arguments) that rebuilds it; None: it travels through the host."""

_PLAIN, _SPLICED = b"\x00", b"\x01"
_SPLICE = struct.Struct("<QI")  # offset in the stream, index of the buffer that belongs there
_COUNT = struct.Struct("<I")
_FRAME_BYTES = 64 * 1024  # pickle hands objects of this size to the file as they are


class Encoded(NamedTuple):
    """An object ready to travel. The buffers are views: keep this alive until they are sent."""

    header: bytes
    buffers: list[Buffer]
    num_bytes: int
    """Header and buffers together."""


def encode(obj: object, *, device_hook: DeviceHook | None = None) -> Encoded:
    """Take `obj` apart without copying its large buffers. UnpicklableError names the path to the culprit."""
    coder = _of_thread.coder
    _of_thread.coder = None  # an object's own __reduce__ may encode something: that one makes another
    if coder is None or coder.knows_torch != ("torch" in sys.modules):
        coder = _Coder()
    try:
        coder.dump(obj, device_hook)
    except _PICKLE_ERRORS as error:
        raise UnpicklableError(_explain(obj, error)) from error
    header, buffers = coder.sink.take()
    _of_thread.coder = coder
    if not buffers:
        return Encoded(header, buffers, len(header))
    return Encoded(header, buffers, len(header) + sum(buffer.nbytes for buffer in buffers))


def decode(header: bytes | memoryview, buffers: Sequence[Any], *, device: str | None = None) -> Any:
    """Rebuild the object on `buffers`, in the order that `encode` gave them."""
    previous = _decoding.device
    _decoding.device = device
    try:
        if header[:1] == _PLAIN:
            return pickle.loads(memoryview(header)[1:], buffers=buffers)
        return _decode_spliced(memoryview(header), buffers)
    finally:
        _decoding.device = previous


# --- encoding ---------------------------------------------------------------------------------------------


class _Sink:
    """The file under the pickler. Large bytes and str arrive here whole, and are kept out of the header."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._buffers: list[Buffer] = []
        self._chunks: list[bytes] = []
        self._splices: list[bytes] = []
        self._num_stream_bytes = 0

    def write(self, chunk: Any) -> int:
        num_bytes = len(chunk)
        if num_bytes >= _FRAME_BYTES and isinstance(chunk, (bytes, bytearray)):
            self._splices.append(_SPLICE.pack(self._num_stream_bytes, len(self._buffers)))
            self._buffers.append(memoryview(chunk))
        else:
            self._chunks.append(chunk if type(chunk) is bytes else bytes(chunk))
            self._num_stream_bytes += num_bytes
        return num_bytes

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's buffer_callback: true keeps the buffer inside the pickle."""
        try:
            view = buffer.raw()
        except BufferError:  # neither C nor Fortran contiguous: the pickler makes a contiguous copy
            return True
        if view.nbytes < RAW_MIN_BYTES:
            return True
        self._buffers.append(view)
        return False

    def take(self) -> tuple[bytes, list[Buffer]]:
        """The header and the buffers of what was written; the next object begins anew."""
        if self._splices:
            parts = (_SPLICED, _COUNT.pack(len(self._splices)), *self._splices, *self._chunks)
            taken = b"".join(parts), self._buffers
        else:
            taken = b"".join((_PLAIN, *self._chunks)), self._buffers
        self._clear()
        return taken


class _TorchPickler(pickle.Pickler):
    """Used once torch is imported in this process; before that no tensor can be in the object."""

    device_hook: DeviceHook | None = None

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        return _reduce_tensor(torch, obj, self.device_hook)


class _Coder:
    """A pickler and the file under it. Used again and again: making them costs more than pickling a small object."""

    __slots__ = ("_pickler", "knows_torch", "sink")

    def __init__(self) -> None:
        self.sink = _Sink()
        self.knows_torch = "torch" in sys.modules
        kind = _TorchPickler if self.knows_torch else pickle.Pickler
        self._pickler = kind(self.sink, protocol=5, buffer_callback=self.sink.take_buffer)

    def dump(self, obj: object, device_hook: DeviceHook | None) -> None:
        pickler = self._pickler
        if isinstance(pickler, _TorchPickler):
            pickler.device_hook = device_hook
        pickler.dump(obj)
        pickler.clear_memo()  # or every object ever sent would stay alive


class _OfThread(threading.local):
    coder: _Coder | None = None


_of_thread = _OfThread()


def _reduce_tensor(torch: Any, tensor: Any, device_hook: DeviceHook | None) -> Any:
    is_parameter = type(tensor) is torch.nn.Parameter
    if type(tensor) is not torch.Tensor and not is_parameter:
        return NotImplemented  # DTensor and other subclasses know best how they are rebuilt
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return NotImplemented
    values = tensor.detach()
    if is_parameter:
        return _rebuild_parameter, (values, tensor.requires_grad)
    exported = device_hook(values) if device_hook is not None else None
    if exported is not None:
        return exported
    was_on_cpu = tensor.device.type == "cpu"
    values = values.resolve_conj().resolve_neg().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy()
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    return _rebuild_tensor, (pickle.PickleBuffer(raw), dtype_name, tuple(tensor.shape), was_on_cpu)


# --- decoding ---------------------------------------------------------------------------------------------


class _Decoding(threading.local):
    """Where the decode that runs in this thread puts tensors that were not on the CPU."""

    device: str | None = None


_decoding = _Decoding()


def decoding_device() -> str | None:
    """Where the decode that runs in this thread puts tensors that were not on the CPU; None: on the CPU."""
    return _decoding.device


def _rebuild_tensor(raw: Any, dtype_name: str, shape: tuple[int, ...], was_on_cpu: bool) -> Any:
    import torch

    dtype = getattr(torch, dtype_name)
    view = memoryview(raw)
    if view.nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        own = bytearray(view) if view.readonly else raw
        tensor = torch.frombuffer(own, dtype=torch.uint8).view(dtype).view(shape)
    if was_on_cpu or _decoding.device is None:
        return tensor
    return tensor.to(_decoding.device)


def _rebuild_parameter(values: Any, requires_grad: bool) -> Any:
    import torch

    return torch.nn.Parameter(values, requires_grad=requires_grad)


class _SplicedReader:
    """The file under the unpickler: the stream with each spliced buffer back at its place."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces
        self._piece = 0
        self._offset = 0

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        filled = 0
        while filled < view.nbytes and self._piece < len(self._pieces):
            source = self._pieces[self._piece]
            count = min(view.nbytes - filled, source.nbytes - self._offset)
            view[filled : filled + count] = source[self._offset : self._offset + count]
            filled += count
            self._offset += count
            if self._offset == source.nbytes:
                self._piece += 1
                self._offset = 0
        return filled

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = sum(piece.nbytes for piece in self._pieces[self._piece :]) - self._offset
        data = bytearray(size)
        return bytes(data[: self.readinto(data)])

    def readline(self) -> bytes:
        line = bytearray()
        while byte := self.read(1):
            line += byte
            if byte == b"\n":
                break
        return bytes(line)


def _decode_spliced(header: memoryview, buffers: Sequence[Any]) -> Any:
    (num_splices,) = _COUNT.unpack_from(header, 1)
    table_start = 1 + _COUNT.size
    stream = header[table_start + num_splices * _SPLICE.size :]
    pieces: list[memoryview] = []
    spliced: set[int] = set()
    done = 0
    for n in range(num_splices):
        offset, index = _SPLICE.unpack_from(header, table_start + n * _SPLICE.size)
        pieces += [stream[done:offset], memoryview(buffers[index]).cast("B")]
        spliced.add(index)
        done = offset
    pieces.append(stream[done:])
    out_of_band = [buffer for index, buffer in enumerate(buffers) if index not in spliced]
    reader = _SplicedReader([piece for piece in pieces if piece.nbytes])
    return pickle.Unpickler(reader, buffers=out_of_band).load()


# --- what cannot travel -----------------------------------------------------------------------------------

_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, RecursionError, RuntimeError, ValueError)


def _explain(obj: object, error: Exception) -> str:
    path, culprit, reason = _find_culprit(obj, "object", error, depth=0)
    what = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    hint = "move it to the top level of a module" if _is_local_name(culprit) else "send plain data instead"
    return f"{path} ({what}) cannot travel between processes: {reason}; {hint}, or give its class __reduce__"


def _find_culprit(obj: object, path: str, error: Exception, depth: int) -> tuple[str, object, Exception]:
    """The deepest part of `obj` that fails by itself."""
    if depth < 50:
        for step, part in _parts_of(obj):
            part_error = _pickling_error(part)
            if part_error is not None:
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


def _pickling_error(part: object) -> Exception | None:
    try:
        _Coder().dump(part, None)
    except _PICKLE_ERRORS as error:
        return error
    return None


def _is_local_name(obj: object) -> bool:
    name = obj.__qualname__ if hasattr(obj, "__qualname__") else type(obj).__qualname__
    return "<locals>" in name or "<lambda>" in name


def copy_through(obj: Any) -> Any:
    """`obj` as it would arrive at another process: for tests, and for a worker that lives in this process."""
    encoded = encode(obj)
    return decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])


def frames_of(encoded: Encoded) -> list[bytes | Buffer]:
    """Header and buffers as the frames of one multipart message."""
    return [encoded.header, *encoded.buffers]
