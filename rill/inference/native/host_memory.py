"""How much host memory a process may still take: the machine's, or the container's where that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def free_host_bytes(cgroups: Path = CGROUPS) -> int:
    """Files that the kernel keeps in memory count as free, for the machine and for the container."""
    free: int = psutil.virtual_memory().available
    for limit_file, used_file in _FILES:
        try:
            limit, used = ((cgroups / file).read_text().strip() for file in (limit_file, used_file))
        except OSError:
            continue
        if limit.isdigit():  # "max": no limit
            free = min(free, max(0, int(limit) - int(used) + _cached_bytes(cgroups / limit_file)))
    return free


def _cached_bytes(limit_file: Path) -> int:
    """Of the group's pages, those of files that nobody has used lately."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
