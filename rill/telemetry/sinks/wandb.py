"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rill.config import PartConfig
from rill.errors import MissingExtraError
from rill.telemetry.sinks.base import ROLLOUT_COLUMNS, Account, RunInfo

STEP = "step"


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
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
        )
        self._table = wandb.Table
        # W&B's own step never goes back and begins at 0; a warm-up's steps are negative and a resumed run's repeat.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def tell(self, account: Account) -> None:
        card = self._table(columns=["question", "answer"], data=[list(row) for row in account.card])
        rows = self._table(columns=list(ROLLOUT_COLUMNS), data=[list(row) for row in account.rollouts])
        self._run.log({"run card": card, "rollouts": rows})

    def close(self) -> None:
        self._run.finish()
