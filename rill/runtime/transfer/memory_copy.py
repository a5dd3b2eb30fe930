"""Copies between a process's own memory and shared memory, on several cores where the size is worth it.

One core cannot use all of a machine's memory bandwidth: a payload of many megabytes is copied in parts, side by side.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

PART_BYTES = 4 * 1024 * 1024
"""A part below this size costs more to hand over than to copy."""
_MAX_PARTS = 4


def copy_bytes(target: Any, source: Any) -> None:
    """Copy all of `source` into `target`, two buffers of the same size. Other threads of the process run meanwhile."""
    target, source = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    num_parts = min(_num_cores(), _MAX_PARTS, source.nbytes // PART_BYTES)
    if num_parts < 2:
        np.copyto(target, source)
        return
    step = -(-source.nbytes // num_parts)
    copying: list[Future[None]] = [
        _helpers().submit(np.copyto, target[start : start + step], source[start : start + step])
        for start in range(step, source.nbytes, step)
    ]
    np.copyto(target[:step], source[:step])
    for part in copying:
        part.result()


@cache
def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_PARTS - 1, thread_name_prefix="rill-copy")
