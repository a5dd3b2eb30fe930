"""What every test gets: one thread per process, no network, and skips for what this machine does not have."""

from __future__ import annotations

import gc
import importlib.util
import os

# Before torch is imported anywhere: the tests share few cores, and results must not depend on how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
from hypothesis import HealthCheck, settings

# What is imported while tests are collected stays: looking through it for garbage again and again was two fifths of
# the time that takes.
gc.disable()

# How long an example takes says more about who else uses the machine than about the code.
settings.register_profile("rill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rill")

OPTIONAL_MARKS = ("ray", "vllm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests wait for processes that they have started a third of their time."""
    return 1 + (os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark in OPTIONAL_MARKS:
        if importlib.util.find_spec(mark) is None:
            _skip(items, mark, f"{mark} is not installed: pip install 'rill[{mark}]'")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        _skip(items, "gpu", "no CUDA device")


def _skip(items: list[pytest.Item], mark: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(mark):
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
