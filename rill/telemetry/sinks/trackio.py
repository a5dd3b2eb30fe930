"""Trackio: a local-first tracker with the Weights & Biases interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rill.config import PartConfig
from rill.errors import MissingExtraError
from rill.telemetry.sinks.base import ROLLOUT_COLUMNS, Account, RunInfo


class TrackioSink:
    class Config(PartConfig):
        type: Literal["trackio"] = "trackio"
        project: str = "rill"

    def __init__(self, config: Config, run: RunInfo) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingExtraError('the trackio sink needs trackio: pip install "rill[trackers]"') from error
        # Trackio knows a run by its name.
        self._run = trackio.init(project=config.project, name=run.id, config=dict(run.config), resume="allow")
        self._table = trackio.Table

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def tell(self, account: Account) -> None:
        rows = [dict(zip(ROLLOUT_COLUMNS, row)) for row in account.rollouts]
        card = [{"question": question, "answer": answer} for question, answer in account.card]
        self._run.log({"run card": self._table(data=card), "rollouts": self._table(data=rows)})

    def close(self) -> None:
        self._run.finish()
