"""Supervised fine-tuning: imitate examples, with the loss on the assistant's tokens only.

Rows have messages, a prompt and a completion, or a problem and a written solution. The model it leaves in the run
folder is where an RL recipe can start (`model.path`), and the other way round.
"""

from __future__ import annotations

from typing import Literal

from rill.data.sft import SFTEncoder
from rill.training.sft import SFTTrainer
from rill.workflows.supervised import Kind, SupervisedConfig, SupervisedWorkflow


class SFTWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["sft"] = "sft"
        trainer: SFTTrainer.Config

    kind = Kind(SFTTrainer, SFTEncoder.encode)
