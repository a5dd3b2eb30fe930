"""How many threads a worker's libraries take and how those wait: what is put into a process before they are loaded.

Called by the launcher for a worker's environment, by the agent around the modules it imports for its workers, and by
the worker itself. Numbers that the user sets, in the environment of the driver or of a launch, win.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SPIN_COUNT = 10_000
"""How often an OpenMP thread looks for its next piece of work before it sleeps. A compromise: with the library's own
300,000 two processes on two cores take five times as long and more for a small decoding step, with
OMP_WAIT_POLICY=PASSIVE one alone takes three times as long (few runs, on a busy machine)."""


def thread_env(num_threads: int, user_env: Mapping[str, str]) -> Mapping[str, str]:
    """What the usual libraries read when they are loaded, with what the user asked for on top."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**{name: str(num_threads) for name in names}, **_spin_env(user_env), **user_env}


@contextmanager
def loading_for_workers() -> Iterator[None]:
    """Around imports in the process that workers are forked from: OpenMP reads how long to spin once, when it is
    loaded, so a worker's own environment comes too late for it. A library that asks for GPUs as it is imported must
    not open the driver here, which no fork outlives: torch then asks NVML."""
    env = {**_spin_env({}), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    env = {name: value for name, value in env.items() if name not in os.environ}
    os.environ.update(env)
    try:
        yield
    finally:
        for name in env:
            del os.environ[name]


def limit_threads(num_threads: int) -> None:
    """For libraries that were loaded before the environment was set, in a worker forked after `preload`."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(num_threads)


def _spin_env(user_env: Mapping[str, str]) -> Mapping[str, str]:
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ, *user_env}:
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
