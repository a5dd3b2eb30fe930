"""TensorBoard event files in the run folder: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rill.config import PartConfig
from rill.errors import MissingExtraError
from rill.telemetry.sinks.base import Account, RunInfo


class TensorBoardSink:
    class Config(PartConfig):
        type: Literal["tensorboard"] = "tensorboard"
        folder: str = "tensorboard"
        """Where the event files go, inside the run folder."""
        flush_s: int = 10
        """How long the writer may hold figures back, in seconds."""

    def __init__(self, config: Config, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                'the tensorboard sink needs TensorBoard: pip install "rill[trackers]"'
            ) from error
        self._writer = SummaryWriter(str(run.directory / config.folder), flush_secs=config.flush_s)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def tell(self, account: Account) -> None:
        self._writer.add_text("run card", account.card_markdown())
        self._writer.add_text("rollouts", account.rollouts_markdown())

    def close(self) -> None:
        self._writer.close()
