"""How much host memory a process may still take: the machine's, or the container's where that is less."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def free_host_bytes(cgroups: Path = CGROUPS) -> int:
    """Files that the kernel keeps in memory count as free, for the machine and for the container."""
    free = _available_bytes()
    for limit_file, used_file in _FILES:
        try:
            limit, used = (
                (cgroups / limit_file).read_text().strip(),
                (cgroups / used_file).read_text().strip(),
            )
        except OSError:
            continue
        if limit.isdigit():  # "max": no limit
            free = min(free, max(0, int(limit) - int(used) + _cached_bytes(cgroups / limit_file)))
    return free


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cached_bytes(limit_file: Path) -> int:
    """Of the group's pages, those of files that nobody has used lately."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
