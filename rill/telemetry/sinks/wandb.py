"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rill.config import PartConfig
from rill.errors import MissingExtraError
from rill.telemetry.sinks.base import RunInfo


class WandbSink:
    class Config(PartConfig):
        type: Literal["wandb"] = "wandb"
        project: str = "rill"
        entity: str | None = None
        """A team or user. Unset: the account's default."""
        group: str | None = None
        """Unset: no group."""
        tags: list[str] = []
        mode: Literal["online", "offline", "disabled"] = "online"
        """Offline figures lie in the run folder until `wandb sync`."""

    def __init__(self, config: Config, run: RunInfo) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError('the wandb sink needs wandb: pip install "rill[trackers]"') from error
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=run.name,
            id=run.name,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
