"""The worker of the workflows that learn from rows (rill.workflows.supervised): it reads them and takes steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rill.config import PartConfig
from rill.data.base import Split, open_dataset, open_indexed
from rill.data.loader import LoaderConfig, open_loader
from rill.data.sft import SFTEncoder
from rill.errors import CheckpointError, ConfigError, DataError
from rill.training.engine_config import EngineConfig
from rill.training.preference import PairTrainer, PreferenceTrainer, open_loss
from rill.training.score import ScoreModel
from rill.training.sft import SFTTrainer, open_encoder
from rill.types import Prompt
from rill.workers.learners import LearningWorker, load_place, save_place
from rill.workers.scorers import rendezvous_of


class Kind(NamedTuple):
    """What tells the workflows from each other."""

    open_trainer: Callable[..., SFTTrainer | PairTrainer]
    """(config, rendezvous=, device=)"""
    encode: Callable[[SFTEncoder, Prompt], Any]
    """What the trainer makes steps of, and is evaluated on, of a row."""
    check: Callable[[Prompt], object]
    """Raises DataError for a row that has not what is encoded."""


class SupervisedWorker(LearningWorker):
    """One rank: reads, trains, and keeps its place in the data."""

    trainer: SFTTrainer | PairTrainer

    def __init__(
        self,
        *,
        kind: Kind,
        config: EngineConfig,
        data: PartConfig,
        loader: LoaderConfig,
        batch_size: int,
        num_held_out: int,
    ) -> None:
        """`batch_size`: over all ranks. `num_held_out`: rows that are evaluated on, at most; 0: no evaluations."""
        self.trainer = kind.open_trainer(config, rendezvous=rendezvous_of(self), device=self.device)
        self._kind = kind
        self.encoder = open_encoder(config)
        world = self.trainer.world
        if batch_size % world.data_size:
            raise ConfigError(
                f"loop.batch_size {batch_size} does not divide over {world.data_size} data ranks: use a multiple"
            )
        dataset = open_dataset(data, Split.TRAIN, check=kind.check)
        self.loader = open_loader(dataset, loader, rank=world.data_rank, world=world.data_size)
        self.batch_size = batch_size // world.data_size
        self.held_out: list[Prompt] = []
        self.reason = ""
        """Why there are no evaluations; empty where there are, or where none were asked for."""
        if num_held_out:
            self._open_held_out(data, num_held_out)

    def _examples(self, rows: Sequence[Prompt]) -> list[Any]:
        return [self._kind.encode(self.encoder, row) for row in rows]

    def train(self, num_steps: int) -> dict[str, float]:
        """The figures of the last of these steps; what was left out is counted over all of them."""
        figures: dict[str, float] = {}
        num_skipped = 0.0
        for _ in range(num_steps):
            figures = self.trainer.update(self._examples(self.loader.next(self.batch_size)))
            num_skipped += figures["skipped_samples"]
        figures["skipped_samples"] = num_skipped
        prefix = f"{self.group_name}/"
        return {prefix + key.removeprefix(prefix): value for key, value in figures.items()}

    def evaluate(self) -> dict[str, float]:
        """Figures of the held-out rows; none where the data has no such side."""
        return self.trainer.evaluate(self._examples(self.held_out)) if self.held_out else {}

    def save(self, folder: str) -> None:
        super().save(folder)
        save_place(folder, self.loader, self.trainer.world)

    def load(self, folder: str) -> None:
        super().load(folder)
        place = load_place(folder, self.trainer.world)
        if place is None:
            raise CheckpointError(f"{folder} does not say how far the data was read")
        try:
            self.loader.load_state(place)
        except KeyError as error:
            raise CheckpointError(
                f"{folder} does not say how far the data was read: {error} is missing"
            ) from error

    def export(self, folder: str) -> None:
        self.trainer.export(folder)

    def why_no_evaluations(self) -> str:
        return self.reason

    def _open_held_out(self, data: PartConfig, num_rows: int) -> None:
        """This rank's part. Now and not at the first evaluation: hours of training may lie before that."""
        try:
            rows = open_indexed(data, Split.HELD_OUT)
        except DataError as error:
            self.reason = str(error)
            return
        world, count = self.trainer.world, min(num_rows, len(rows))
        if count < world.data_size:
            self.reason = f"{count} held-out rows for {world.data_size} ranks"
            return
        self.held_out = [rows[number] for number in range(world.data_rank, count, world.data_size)]


def open_policy(config: PreferenceTrainer.Config, *, device: str, **where: Any) -> PreferenceTrainer:
    """Each rank holds the whole reference, the policy as it was before the first step, where the loss needs one."""
    reference = None
    if open_loss(config.loss).needs_reference:
        reference = ScoreModel(ScoreModel.Config(model=config.model).following(config), device=device)
    return PreferenceTrainer(config, reference=reference, device=device, **where)
