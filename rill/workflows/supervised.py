"""The workflows without rollouts: one worker group that reads rows and takes steps.

    sft            imitate: rows have messages, a prompt and a completion, or a problem and a written solution
    reward_model   score: rows have a prompt, a `chosen` and a `rejected` answer; it goes into an RL recipe as
                   `reward_model.model.path`
    dpo            prefer: the same rows, and the policy itself

They differ in what a row becomes and what a step is (`Kind`). Each data rank reads its own part of the data; what it
trains on is dealt out by cost. The model that is left in the run folder is where another recipe starts (`model.path`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from rill.config import Config, OneOf, PartConfig
from rill.data.base import DATASETS, Split, open_dataset, open_indexed
from rill.data.loader import LoaderConfig, open_loader
from rill.data.pairs import encode_pair
from rill.data.sft import SFTEncoder
from rill.errors import CheckpointError, ConfigError, DataError
from rill.journal.checkpoints import RunCheckpoints
from rill.models.loading import ModelConfig
from rill.runtime.group import WorkerGroup
from rill.telemetry.run import Run, write_atomically
from rill.training.engine_config import EngineConfig
from rill.training.preference import PairTrainer, PreferenceTrainer, RewardTrainer, open_loss
from rill.training.score import ScoreModel
from rill.training.sft import SFTTrainer, open_encoder
from rill.types import Prompt
from rill.workflows.config import ClusterConfig, RecipeConfig, Seats
from rill.workflows.launch import open_cluster
from rill.workflows.learners import LearningWorker
from rill.workflows.loop import Observer, StepReport
from rill.workflows.scorers import rendezvous_of

LOADER_FILE = "loader.json"


class SupervisedLoopConfig(Config):
    """[loop]"""

    steps: int = Field(500, ge=1)
    """Optimizer steps of the whole run, resumed parts included."""
    batch_size: int = Field(64, ge=1)
    """Rows in a step, over all ranks."""
    report_every: int = Field(10, ge=1)
    """Steps between two lines of progress."""
    eval_every: int = Field(100, ge=0)
    """Steps between evaluations of the held-out loss. 0: off."""
    eval_examples: int = Field(256, ge=1)
    checkpoint_every: int = Field(0, ge=0)
    """Steps. 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    timeout_s: float = Field(3600.0, gt=0)
    """Deadline of the steps between two reports."""


class SupervisedConfig(RecipeConfig):
    """A recipe; the workflows add their trainer."""

    model: ModelConfig
    data: Annotated[PartConfig, OneOf(DATASETS)]
    loader: LoaderConfig = LoaderConfig()
    trainer: EngineConfig
    loop: SupervisedLoopConfig = SupervisedLoopConfig()
    placement: Seats = "all"
    cluster: ClusterConfig = ClusterConfig()

    handed_down = {"model.seed": "seed", "loader.seed": "seed", "trainer.model": "model"}


class Kind(NamedTuple):
    """What tells the workflows from each other."""

    open_trainer: Callable[..., SFTTrainer | PairTrainer]
    """(config, rendezvous=, device=)"""
    encode: Callable[[SFTEncoder, Prompt], Any]
    """What the trainer makes steps of, and is evaluated on, of a row."""


class SupervisedWorker(LearningWorker):
    """One rank: reads, trains, and keeps its place in the data."""

    trainer: SFTTrainer | PairTrainer

    def __init__(self, *, recipe: SupervisedConfig, kind: Kind) -> None:
        config, loop = recipe.trainer, recipe.loop
        self.trainer = kind.open_trainer(config, rendezvous=rendezvous_of(self), device=self.device)
        self._kind = kind
        self.encoder = open_encoder(config)
        world = self.trainer.world
        if loop.batch_size % world.data_size:
            raise ConfigError(
                f"loop.batch_size {loop.batch_size} does not divide over {world.data_size} data ranks: use a multiple"
            )
        dataset = open_dataset(recipe.data, Split.TRAIN)
        self.loader = open_loader(dataset, recipe.loader, rank=world.data_rank, world=world.data_size)
        self.batch_size = loop.batch_size // world.data_size
        self.held_out: list[Prompt] = []
        self.reason = ""
        """Why there are no evaluations; empty where there are, or where none were asked for."""
        if loop.eval_every:
            self._open_held_out(recipe)

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
        if self.trainer.world.leads:
            path = Path(folder) / f"{self.trainer.world.data_rank}-{LOADER_FILE}"
            write_atomically(path, json.dumps(self.loader.state()))

    def load(self, folder: str) -> None:
        super().load(folder)
        path = Path(folder) / f"{self.trainer.world.data_rank}-{LOADER_FILE}"
        if not path.exists():  # fewer ranks wrote it: all stood at the same place, so the first one's will do
            path = path.with_name(f"0-{LOADER_FILE}")
        try:
            self.loader.load_state(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def export(self, folder: str) -> None:
        self.trainer.export(folder)

    def why_no_evaluations(self) -> str:
        return self.reason

    def _open_held_out(self, recipe: SupervisedConfig) -> None:
        """This rank's part. Now and not at the first evaluation: hours of training may lie before that."""
        try:
            rows = open_indexed(recipe.data, Split.HELD_OUT)
        except DataError as error:
            self.reason = str(error)
            return
        world, count = self.trainer.world, min(recipe.loop.eval_examples, len(rows))
        if count < world.data_size:
            self.reason = f"{count} held-out rows for {world.data_size} ranks"
            return
        self.held_out = [rows[number] for number in range(world.data_rank, count, world.data_size)]


class SupervisedWorkflow:
    kind: ClassVar[Kind]

    def __init__(self, config: SupervisedConfig, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config, loop = self.config, self.config.loop
        with open_cluster(config.cluster, self.folder) as cluster:
            worker = SupervisedWorker.launch(
                cluster,
                name=config.workflow,
                placement=config.placement,
                threads=config.cluster.threads_on(len(cluster.devices)),
                recipe=config,
                kind=self.kind,
            )
            groups = {config.workflow: worker}
            with RunCheckpoints(self.folder, groups, loop.keep_checkpoints, loop.timeout_s) as checkpoints:
                self._train(worker, checkpoints)
            worker.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=loop.timeout_s)

    def _train(self, worker: WorkerGroup[SupervisedWorker], checkpoints: RunCheckpoints) -> None:
        loop = self.config.loop
        step = checkpoints.load_latest() or 0
        reason = worker.why_no_evaluations().wait(timeout_s=loop.timeout_s)[0]
        notes = (f"no evaluations: {reason}",) if reason else ()
        while step < loop.steps:
            num_steps = min(loop.report_every, loop.steps - step)
            figures = worker.train(num_steps).wait(timeout_s=loop.timeout_s)[0]
            step += num_steps
            if loop.eval_every and (crosses(step, num_steps, loop.eval_every) or step == loop.steps):
                figures = {**figures, **worker.evaluate().wait(timeout_s=loop.timeout_s)[0]}
            report = StepReport(step=step, num_steps=loop.steps, metrics=figures, notes=notes)
            notes = ()  # said once
            try:
                report.tell(self.observers)
            except KeyboardInterrupt:  # an observer's wish to stop here: what is done is kept
                checkpoints.save(step)
                raise
            if step == loop.steps or (
                loop.checkpoint_every and crosses(step, num_steps, loop.checkpoint_every)
            ):
                checkpoints.save(step)


def open_policy(config: PreferenceTrainer.Config, *, device: str, **where: Any) -> PreferenceTrainer:
    """Each rank holds the whole reference, the policy as it was before the first step, where the loss needs one."""
    reference = None
    if open_loss(config.loss).needs_reference:
        reference = ScoreModel(ScoreModel.Config(model=config.model).following(config), device=device)
    return PreferenceTrainer(config, reference=reference, device=device, **where)


class SFTWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["sft"] = "sft"
        trainer: SFTTrainer.Config

    kind = Kind(SFTTrainer, SFTEncoder.encode)


class RewardModelWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["reward_model"] = "reward_model"
        trainer: RewardTrainer.Config

    kind = Kind(RewardTrainer, encode_pair)


class DPOWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["dpo"] = "dpo"
        trainer: PreferenceTrainer.Config

    kind = Kind(open_policy, encode_pair)


def crosses(step: int, num_steps: int, every: int) -> bool:
    """Whether a multiple of `every` lies among the last `num_steps` steps up to `step`."""
    return step // every > (step - num_steps) // every
