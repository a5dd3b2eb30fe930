"""rill: reinforcement-learning post-training. Write the workflow once; run it from a laptop to a cluster.

The names below are the public interface. Each is imported from its room when it is first used, so that
`import rill` costs nothing and pulls in neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "Cluster",
    "Config",
    "Group",
    "Handle",
    "Message",
    "PolicyVersion",
    "Prompt",
    "RillError",
    "Sample",
    "SamplingParams",
    "StopReason",
    "Trajectory",
    "Turn",
    "Worker",
    "WorkerGroup",
    "__version__",
]

if TYPE_CHECKING:
    from rill.config.base import Config
    from rill.errors import RillError
    from rill.runtime.channel import Channel
    from rill.runtime.cluster import Cluster
    from rill.runtime.group import WorkerGroup
    from rill.runtime.handle import Handle
    from rill.runtime.worker import Worker
    from rill.types import (
        Group,
        Message,
        PolicyVersion,
        Prompt,
        Sample,
        SamplingParams,
        StopReason,
        Trajectory,
        Turn,
    )

_HOMES = {
    "Channel": "rill.runtime.channel",
    "Cluster": "rill.runtime.cluster",
    "Config": "rill.config.base",
    "Handle": "rill.runtime.handle",
    "RillError": "rill.errors",
    "Worker": "rill.runtime.worker",
    "WorkerGroup": "rill.runtime.group",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rill' has no attribute {name!r}: its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES.get(name, "rill.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
