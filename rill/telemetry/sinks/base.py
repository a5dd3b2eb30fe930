"""What a tracker is to rill: something that takes the figures of a step.

A sink is built from its Config and a RunInfo, is called from the one process that owns the MetricLog, and may
raise anything: MetricLog drops it then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rill.config import PartConfig
from rill.registry import Registry

SINKS = Registry(
    "sink",
    {
        "tensorboard": "rill.telemetry.sinks.tensorboard:TensorBoardSink",
        "wandb": "rill.telemetry.sinks.wandb:WandbSink",
        "trackio": "rill.telemetry.sinks.trackio:TrackioSink",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a tracker is told of a run."""

    name: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def build_sinks(configs: Sequence[PartConfig], run: RunInfo) -> list[Sink]:
    """The configured sinks, in order. Raises MissingExtraError where a library is absent."""
    return [SINKS.load(config.type)(config, run) for config in configs]
