"""The processor, as an accelerator: a slot per core, host memory, gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rill.runtime.device.accelerator import Accelerator

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Cpu(Accelerator):
    torch_name = "cpu"

    def devices(self) -> Sequence[int]:
        return range(os.cpu_count() or 1)

    def memory_bytes(self, device: str = "cpu") -> tuple[int, int]:
        """Of the machine, or of the container where that has less."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        free = page_bytes * os.sysconf("SC_AVPHYS_PAGES")
        total = page_bytes * os.sysconf("SC_PHYS_PAGES")
        for line in _lines("/proc/meminfo"):
            if line.startswith("MemAvailable:"):  # what is cached can be had too
                free = 1024 * int(line.split()[1])
        for limit_path, used_path in _CGROUP_FILES:
            limit, used = _lines(limit_path), _lines(used_path)
            if limit and used and limit[0].isdigit() and int(limit[0]) < total:
                total = int(limit[0])
                free = min(free, max(0, total - int(used[0])))
        return free, total


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, or another kind of container
        return []
