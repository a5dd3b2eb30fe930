"""Supervised fine-tuning: imitate examples, with the loss on the assistant's tokens only.

One worker group, each rank reading its own part of the data. The model it leaves in the run folder is where an RL
recipe can start (`model.path`), and the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rill.config import Config, OneOf, PartConfig
from rill.data.base import DATASETS, Split, open_dataset, open_indexed, prompts_of
from rill.data.chat import PromptEncoder
from rill.data.loader import LoaderConfig, open_loader
from rill.data.sft import SFTEncoder
from rill.models.loading import ModelConfig, load_tokenizer
from rill.runtime.worker import Worker
from rill.telemetry.run import Run
from rill.training.sft import SFTTrainer
from rill.workflows.assembly import open_cluster, threads_of
from rill.workflows.checkpoints import RunCheckpoints
from rill.workflows.loop import Observer, StepReport
from rill.workflows.sections import ClusterConfig, RecipeConfig, Seats, as_table
from rill.workflows.stages import rendezvous_of

LOADER_FILE = "loader.json"


class SFTLoopConfig(Config):
    """[loop]"""

    steps: int = Field(500, ge=1)
    """Optimizer steps of the whole run, resumed parts included."""
    batch_size: int = Field(64, ge=1)
    """Examples in a step, over all ranks."""
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


class SFTWorker(Worker):
    def __init__(
        self, *, config: SFTTrainer.Config, data: PartConfig, loader: LoaderConfig, loop: SFTLoopConfig
    ) -> None:
        self.trainer = SFTTrainer(config, rendezvous=rendezvous_of(self), device=self.device)
        self.encoder = SFTEncoder(
            PromptEncoder(load_tokenizer(config.model)), max_tokens=config.micro_batch_tokens
        )
        dataset = open_dataset(data, Split.TRAIN)
        self.loader = open_loader(dataset, loader, rank=self.rank, world=self.world_size)
        self.batch_size = max(1, loop.batch_size // self.world_size)
        self.data = data
        self.loop = loop

    def train(self, num_steps: int) -> dict[str, float]:
        """The figures of the last of these steps."""
        figures: dict[str, float] = {}
        for _ in range(num_steps):
            prompts = self.loader.next(self.batch_size)
            figures = self.trainer.update([self.encoder.encode(prompt) for prompt in prompts])
        return {f"sft/{name.removeprefix('sft/')}": value for name, value in figures.items()}

    def evaluate(self) -> dict[str, float]:
        held_out = list(prompts_of(open_indexed(self.data, Split.HELD_OUT), self.loop.eval_examples))
        mine = held_out[self.rank :: self.world_size]
        return self.trainer.evaluate([self.encoder.encode(prompt) for prompt in mine])

    def save(self, folder: str) -> None:
        self.trainer.save(folder)
        (Path(folder) / f"{self.rank}-{LOADER_FILE}").write_text(
            json.dumps(self.loader.state()), encoding="utf-8"
        )

    def load(self, folder: str) -> None:
        self.trainer.load(folder)
        self.loader.load_state(
            json.loads((Path(folder) / f"{self.rank}-{LOADER_FILE}").read_text(encoding="utf-8"))
        )

    def export(self, folder: str) -> None:
        self.trainer.export(folder)


class SFTWorkflow:
    class Config(RecipeConfig):
        workflow: Literal["sft"] = "sft"
        model: ModelConfig
        data: Annotated[PartConfig, OneOf(DATASETS)]
        """Rows with messages, prompt and completion, or problems with a written solution."""
        loader: LoaderConfig = LoaderConfig()
        trainer: SFTTrainer.Config
        loop: SFTLoopConfig = SFTLoopConfig()
        placement: Seats = "all"
        cluster: ClusterConfig = ClusterConfig()

        @model_validator(mode="before")
        @classmethod
        def _hand_down(cls, values: Any) -> Any:
            if isinstance(values, dict) and "model" in values:
                seed, model = values.get("seed", 0), values["model"]
                if isinstance(model, dict):
                    model = {"seed": seed, **model}
                trainer = {"model": model, **as_table(values.get("trainer", {}))}
                loader = {"seed": seed, **as_table(values.get("loader", {}))}
                values = {**values, "model": model, "trainer": trainer, "loader": loader}
            return values

    def __init__(self, config: Config, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers

    def run(self) -> None:
        config, loop = self.config, self.config.loop
        with open_cluster(config.cluster, self.folder) as cluster:
            worker = SFTWorker.launch(
                cluster,
                name="sft",
                placement=config.placement,
                threads=threads_of(config.cluster, cluster),
                config=config.trainer,
                data=config.data,
                loader=config.loader,
                loop=loop,
            )
            checkpoints = RunCheckpoints(self.folder, {"sft": worker}, loop.keep_checkpoints, loop.timeout_s)
            step = checkpoints.load_latest()
            while step < loop.steps:
                num_steps = min(loop.report_every, loop.steps - step)
                figures = worker.train(num_steps).wait(timeout_s=loop.timeout_s)[0]
                step += num_steps
                if loop.eval_every and (crosses(step, num_steps, loop.eval_every) or step == loop.steps):
                    figures = {**figures, **worker.evaluate().wait(timeout_s=loop.timeout_s)[0]}
                self._report(step, figures)
                if step == loop.steps or (
                    loop.checkpoint_every and crosses(step, num_steps, loop.checkpoint_every)
                ):
                    checkpoints.save(step)
            worker.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=loop.timeout_s)

    def _report(self, step: int, figures: Mapping[str, float]) -> None:
        for observer in self.observers:
            observer(StepReport(step=step, num_steps=self.config.loop.steps, metrics=figures))


def crosses(step: int, num_steps: int, every: int) -> bool:
    """Whether a multiple of `every` lies among the last `num_steps` steps up to `step`."""
    return step // every > (step - num_steps) // every
