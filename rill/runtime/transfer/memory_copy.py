"""What is done to every byte of a large payload, copying and hashing, on several cores where the size is worth it.

One core cannot use all of a machine's memory bandwidth, and hashes less than a network brings: a payload of many
megabytes is dealt with in parts, side by side.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

PART_BYTES = 4 * 1024 * 1024
"""A part below this size costs more to hand over than to copy."""
_HASHED_BYTES = 1024 * 1024
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


def digest(data: Any) -> bytes:
    """A cryptographic digest: of the data, or, where it is large, of the digests of its parts."""
    view = memoryview(data)
    if view.nbytes < 2 * _HASHED_BYTES:
        return _hash(view)
    parts = [view[start : start + _HASHED_BYTES] for start in range(0, view.nbytes, _HASHED_BYTES)]
    return hashlib.blake2b(b"".join(_helpers().map(_hash, parts)), digest_size=32, person=b"parts").digest()


def _hash(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


@cache
def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_PARTS - 1, thread_name_prefix="rill-copy")
