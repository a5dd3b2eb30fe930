"""Keeps memory that a CPU trainer has freed, for its next step.

Caller: rill.training.engine. glibc gives large blocks back to the kernel when they are freed, so that every activation
of every step would be mapped and cleared again: tens of thousands of page faults a step. Holds for the whole process;
on systems without glibc nothing happens.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MOST_KEPT_BYTES = 2**31 - 1
"""Free memory at the end of the heap above this goes back to the system."""


@functools.cache
def keep_freed_memory() -> bool:
    """True where it could be arranged."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or no such call in it
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES))
