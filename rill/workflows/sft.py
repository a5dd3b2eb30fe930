"""Supervised fine-tuning: imitate examples, with the loss on the assistant's tokens only.

The model it leaves in the run folder is where an RL recipe can start (`model.path`), and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rill.data.sft import SFTExample
from rill.training.engine_config import EngineConfig
from rill.training.sft import SFTTrainer
from rill.types import Prompt
from rill.workflows.scorers import rendezvous_of
from rill.workflows.supervised import SupervisedConfig, SupervisedWorker, SupervisedWorkflow


class SFTWorker(SupervisedWorker):
    def _open_trainer(self, config: EngineConfig) -> SFTTrainer:
        return SFTTrainer(config, rendezvous=rendezvous_of(self), device=self.device)

    def _examples(self, rows: Sequence[Prompt]) -> list[SFTExample]:
        return [self.encoder.encode(row) for row in rows]


class SFTWorkflow(SupervisedWorkflow):
    """Rows with messages, prompt and completion, or problems with a written solution."""

    worker = SFTWorker

    class Config(SupervisedConfig):
        workflow: Literal["sft"] = "sft"
        trainer: SFTTrainer.Config
