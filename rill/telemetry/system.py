"""What a process and its machine use, as counters in the trace: read by the dashboard's System page.

Called by the tracer's own thread every SAMPLE_S, in every traced process. What belongs to the machine (all processors,
memory, disk, network, GPUs) is written by one process of it: the one that holds a lock in the trace folder; when that
ends, another takes it over.

    process/cpu       cores in use                 process/memory_bytes
    host/cpu          share of all cores, 0 to 1   host/memory, host/disk     share in use
    host/net_in_bytes_per_s, host/net_out_bytes_per_s
    gpu 0/busy        share, 0 to 1                gpu 0/memory               share in use
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import time
from pathlib import Path

import psutil

SAMPLE_S = 5.0


class SystemSampler:
    def __init__(self, trace_folder: Path) -> None:
        self._folder = trace_folder
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first calls only start the clock
        psutil.cpu_percent()
        self._lock_fd = -1
        self._last_net: tuple[float, int, int] | None = None
        self._gpus = _Gpus()

    def sample(self) -> dict[str, float]:
        """The figures of this moment. What the machine does not tell (a full disk, a container) is left out."""
        values: dict[str, float] = {}
        try:
            values["process/cpu"] = self._process.cpu_percent() / 100
            values["process/memory_bytes"] = float(self._process.memory_info().rss)
            if self._speaks_for_host():
                values |= self._host()
                values |= self._gpus.sample()
        except (OSError, psutil.Error):
            pass
        return values

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _host(self) -> dict[str, float]:
        net, now_s = psutil.net_io_counters(), time.monotonic()
        values = {
            "host/cpu": psutil.cpu_percent() / 100,
            "host/memory": psutil.virtual_memory().percent / 100,
            "host/disk": psutil.disk_usage(str(self._folder)).percent / 100,
        }
        if net is not None:
            if self._last_net is not None:
                spent_s = max(1e-3, now_s - self._last_net[0])
                values["host/net_in_bytes_per_s"] = (net.bytes_recv - self._last_net[1]) / spent_s
                values["host/net_out_bytes_per_s"] = (net.bytes_sent - self._last_net[2]) / spent_s
            self._last_net = (now_s, net.bytes_recv, net.bytes_sent)
        return values

    def _speaks_for_host(self) -> bool:
        if self._lock_fd >= 0:
            return True
        path = self._folder / f".host-{socket.gethostname()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Gpus:
    """NVIDIA's management library, which comes with the driver; nothing where there is none."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._handles: list[ctypes.c_void_p] = []
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        self._library = library
        for i in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def sample(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._library is None:
            return values
        for i, handle in enumerate(self._handles):
            used, memory = _Utilization(), _Memory()
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0:
                values[f"gpu {i}/busy"] = used.gpu / 100
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 and memory.total:
                values[f"gpu {i}/memory"] = memory.used / memory.total
        return values
