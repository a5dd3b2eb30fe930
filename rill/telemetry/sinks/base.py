"""What a tracker is to rill: something that takes the figures of a step, and at the end the run card and some rollouts.

A sink is built from its Config and a RunInfo, is called from the one process that owns the MetricLog, and may
raise anything: MetricLog drops it then. All of them get the same names. A run is known to a tracker by `RunInfo.id`, so
a second run of one name is a second run there, and a resumed run goes on in its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rill.config import PartConfig
from rill.errors import RillError
from rill.registry import Registry

_log = logging.getLogger(__name__)

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
    id: str
    """Of this run alone, the same when it is resumed."""
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a run has to say of itself when it ends."""

    card: Sequence[tuple[str, str]]
    """(question, answer)"""
    rollouts: Sequence[tuple[int, str, str, float]] = ()
    """(step, prompt, answer, reward)"""

    def card_markdown(self) -> str:
        return "\n".join(["| | |", "|---|---|", *(f"| {cell(q)} | {cell(a)} |" for q, a in self.card)])

    def rollouts_markdown(self) -> str:
        rows = (f"| {step} | {cell(p)} | {cell(a)} | {reward:.3g} |" for step, p, a, reward in self.rollouts)
        return "\n".join(["| step | prompt | answer | reward |", "|---|---|---|---|", *rows])


ROLLOUT_COLUMNS = ("step", "prompt", "answer", "reward")


def cell(text: str) -> str:
    """Text in a Markdown table: no markup, no line of its own."""
    plain = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return " ".join(plain.split())


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def tell(self, account: Account) -> None: ...

    def close(self) -> None: ...


def build_sinks(
    configs: Sequence[PartConfig], run: RunInfo, tell: Callable[[str], None] = _log.warning
) -> list[Sink]:
    """The configured sinks, in order. Raises MissingExtraError where a library is absent; one that cannot be begun
    otherwise, because its tracker is away, is told of and left out."""
    sinks = []
    for config in configs:
        kind = SINKS.load(config.type)
        try:
            sinks.append(kind(config, run))
        except RillError:
            raise
        except Exception as error:  # noqa: BLE001 - boundary: third-party trackers raise anything
            tell(f"warning: the run goes on without the sink {config.type}, which cannot begin: {error}")
    return sinks
