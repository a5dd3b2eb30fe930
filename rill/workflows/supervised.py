"""The workflows without rollouts: one worker group that reads rows and takes steps.

    sft            imitate: rows have messages, a prompt and a completion, or a problem and a written solution
    reward_model   score: rows have a prompt, a `chosen` and a `rejected` answer; it goes into an RL recipe as
                   `reward_model.model.path`
    dpo            prefer: the same rows, and the policy itself

They differ in what a row becomes and what a step is (`Kind`). Each data rank reads its own part of the data; what it
trains on is dealt out by cost. The model that is left in the run folder is where another recipe starts (`model.path`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rill.config import Config, OneOf, PartConfig
from rill.data.base import DATASETS
from rill.data.loader import LoaderConfig
from rill.data.pairs import answers_of, encode_pair
from rill.data.sft import SFTEncoder, check_written
from rill.journal.checkpoints import RunCheckpoints
from rill.models.loading import ModelConfig
from rill.runtime.group import WorkerGroup
from rill.telemetry.run import Run
from rill.training.engine_config import EngineConfig
from rill.training.preference import PreferenceTrainer, RewardTrainer
from rill.training.sft import SFTTrainer
from rill.workers.supervised import Kind, SupervisedWorker, open_policy
from rill.workflows.config import ClusterConfig, RecipeConfig, Seats
from rill.workflows.launch import open_cluster
from rill.workflows.loop import Observer, StepReport, restored


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
                kind=self.kind,
                config=config.trainer,
                data=config.data,
                loader=config.loader,
                batch_size=loop.batch_size,
                num_held_out=loop.eval_examples if loop.eval_every else 0,
            )
            groups = {config.workflow: worker}
            with RunCheckpoints(self.folder, groups, loop.keep_checkpoints, loop.timeout_s) as checkpoints:
                self._train(worker, checkpoints)
            worker.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=loop.timeout_s)

    def _train(self, worker: WorkerGroup[SupervisedWorker], checkpoints: RunCheckpoints) -> None:
        loop = self.config.loop
        step = restored(checkpoints, loop.steps, self.observers)
        reason = worker.why_no_evaluations().wait(timeout_s=loop.timeout_s)[0]
        notes = (f"no evaluations: {reason}",) if reason else ()
        while step < loop.steps:
            num_steps = min(loop.report_every, loop.steps - step)
            figures = worker.train(num_steps).wait(timeout_s=loop.timeout_s)[0]
            step += num_steps
            is_last = step == loop.steps
            if crosses(step, num_steps, loop.eval_every) or (is_last and loop.eval_every):
                figures = {**figures, **worker.evaluate().wait(timeout_s=loop.timeout_s)[0]}
            report = StepReport(step=step, num_steps=loop.steps, metrics=figures, notes=notes)
            notes = ()  # said once
            report.tell(self.observers, partial(checkpoints.save, step))
            if is_last or crosses(step, num_steps, loop.checkpoint_every):
                checkpoints.save(step)


class SFTWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["sft"] = "sft"
        trainer: SFTTrainer.Config

    kind = Kind(SFTTrainer, SFTEncoder.encode, check_written)


class RewardModelWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["reward_model"] = "reward_model"
        trainer: RewardTrainer.Config

    kind = Kind(RewardTrainer, encode_pair, answers_of)


class DPOWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["dpo"] = "dpo"
        trainer: PreferenceTrainer.Config

    kind = Kind(open_policy, encode_pair, answers_of)


def crosses(step: int, num_steps: int, every: int) -> bool:
    """Whether a multiple of `every` lies among the last `num_steps` steps up to `step`; of 0 none does."""
    return every > 0 and step // every > (step - num_steps) // every
