"""CUDA's driver and run-time compiler, through ctypes: what torch has no call for.

    kernel = CudaKernel(source, "name", {"MACRO": 1})    compiled once per machine and kept in the user's cache folder
    kernel.launch(blocks, threads, argument)             on torch's current stream; can be captured in a graph
    kernel.launch_early(grid, threads, argument)         the same, overlapping the kernel before
    tensor_map(tensor, sizes, strides, box)              how the copy engine finds tiles of a tensor

The compiler, NVRTC, comes with torch's CUDA builds. Sources include no headers, so nothing else has to be installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rill.errors import EngineError
from rill.models.packaged import cache_folder

_MAX_DYNAMIC_MEMORY = 8
"""A function's attribute."""
_COOPERATIVE, _CLUSTER, _EARLY = 2, 4, 6
"""A launch's: all blocks run at one time or none does; blocks to a cluster; it may begin before the one before ends."""
_BFLOAT16, _SWIZZLE_128, _PROMOTE_256 = 9, 3, 3
"""A tensor map's: its numbers, how they lie in shared memory, how many bytes are read into the second cache."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("memory_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class CudaKernel:
    """One function of a source, for blocks that share memory_bytes each and run in clusters."""

    def __init__(
        self, source: str, name: str, macros: Mapping[str, int], *, memory_bytes: int, cluster: int
    ) -> None:
        binary = _compiled(source, [f"-D{key}={value}" for key, value in macros.items()])
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(module), binary)  # for as long as the process lives
        call_driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        call_driver("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_MEMORY, memory_bytes)
        self._memory_bytes, self._cluster = memory_bytes, cluster

    def max_clusters(self, num_threads: int) -> int:
        """That run at one time."""
        found = ctypes.c_int()
        config, _ = self._config((self._cluster, 1, 1), num_threads, None)
        call_driver("cuOccupancyMaxActiveClusters", ctypes.byref(found), self._function, ctypes.byref(config))
        return found.value

    def launch(self, num_blocks: int, num_threads: int, argument: ctypes.Structure) -> None:
        """All blocks at one time: they may wait for each other."""
        self._launch(self._config((num_blocks, 1, 1), num_threads, _COOPERATIVE), argument)

    def launch_early(self, grid: tuple[int, int, int], num_threads: int, argument: ctypes.Structure) -> None:
        """Perhaps while the kernel before still runs: it waits for that by itself, where it has to."""
        self._launch(self._config(grid, num_threads, _EARLY), argument)

    def _launch(self, made: tuple[_LaunchConfig, Any], argument: ctypes.Structure) -> None:
        config, _attributes = made
        config.stream = torch.cuda.current_stream().cuda_stream
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        call_driver("cuLaunchKernelEx", ctypes.byref(config), self._function, arguments, None)

    def _config(
        self, grid: tuple[int, int, int], num_threads: int, attribute: int | None
    ) -> tuple[_LaunchConfig, Any]:
        attributes = (_LaunchAttribute * 2)()
        attributes[0].id, attributes[0].value[:3] = _CLUSTER, (self._cluster, 1, 1)
        if attribute is not None:
            attributes[1].id, attributes[1].value[0] = attribute, 1
        count = 1 if attribute is None else 2
        config = _LaunchConfig(grid, (num_threads, 1, 1), self._memory_bytes, None, attributes, count)
        return config, attributes


def tensor_map(
    tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """Where the copy engine finds boxes of a bf16 tensor, whose rows of 128 bytes it swizzles; what lies outside is
    zero. Innermost axis first; `strides`: of the other axes, in numbers."""
    rank = len(sizes)
    room = ctypes.create_string_buffer(128 + 63)
    aligned = (ctypes.addressof(room) + 63) // 64 * 64
    many, words = ctypes.c_ulonglong, ctypes.c_uint
    call_driver(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), _BFLOAT16, rank, ctypes.c_void_p(tensor.data_ptr()),
        (many * rank)(*sizes), (many * (rank - 1))(*(2 * stride for stride in strides)), (words * rank)(*box),
        (words * rank)(*[1] * rank), 0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    return ctypes.string_at(aligned, 128)


def _compiled(source: str, macros: list[str]) -> bytes:
    """For the current device."""
    major, minor = torch.cuda.get_device_capability()
    specific = "a" if major == 9 else ""  # with what only this architecture has: its tensor cores' tiles
    options = ["--std=c++17", f"--gpu-architecture=sm_{major}{minor}{specific}", *macros]
    identity = hashlib.sha256("\0".join([source, *options, torch.version.cuda or ""]).encode())
    path = cache_folder() / f"kernel-{identity.hexdigest()[:16]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        binary = _compile(source, options)
    _keep(path, binary)
    return binary


def _compile(source: str, options: list[str]) -> bytes:
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise EngineError(f"a CUDA kernel does not compile: {log.value.decode(errors='replace')[:2000]}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _keep(path: Path, binary: bytes) -> None:
    """Where that is possible; several processes may do it at one time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        Path(draft).replace(path)
    except OSError:
        pass


@cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EngineError(f"CUDA's run-time compiler (libnvrtc.so.{major}), which comes with torch, is not there")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: Any) -> None:
    """Of the CUDA driver. Whole numbers are given with 64 bits."""
    given = [ctypes.c_ulonglong(each) if isinstance(each, int) else each for each in arguments]
    if code := getattr(_driver(), name)(*given):
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise EngineError(f"{name}: {(text.value or b'').decode()} ({code})")
