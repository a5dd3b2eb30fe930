"""What an optimizer works on: one slot per trained parameter, its settings, and which slots decay.

Callers: rill.training.engine makes the slots; rill.training.optim and the optimizers behind it read them. An optimizer
sees plain local tensors, never how a parameter is distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.config import Config
from rill.training.parallel import local


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One trained parameter."""

    name: str
    template: Tensor
    """The module's own parameter, distributed or not."""
    master: Tensor
    """This rank's part, in the precision that is optimised. Its .grad is the accumulated gradient."""
    is_matrix: bool
    """A weight matrix inside the decoder: what Muon is for. Embeddings and heads are not."""
    has_copy: bool = False
    """The module computes with a low-precision copy of the master; its gradients come in that precision."""

    def gradient(self) -> Tensor | None:
        """This rank's part: float32 where passes were added up, else as the only pass left it."""
        if self.master.grad is not None or self.template.grad is None:
            return self.master.grad
        return local(self.template.grad)


class OptimizerConfig(Config):
    """Which optimizer, and its constants."""

    type: Literal["adamw", "muon", "adamw8bit", "sgd"] = "adamw"
    """`adamw8bit` keeps the moments of matrices in 8 bits (2 bytes a parameter, not 8). `muon` uses AdamW for
    everything that is not a decoder matrix."""
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled, for SGD added to the gradient. 0: off."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Of Muon (Nesterov) and SGD."""
    one_pass: bool = True
    """AdamW with bf16 compute on one CUDA device with Triton: scale, update and copy in one kernel, which also reads
    bf16 gradients as they are. Saves about a third of the optimizer's memory traffic. Elsewhere it means nothing."""
    offload_state: bool = False
    """Keep optimizer state in pinned host memory and stream it through the device each step."""


class SlotAdamW(torch.optim.Optimizer):
    """An AdamW of rill's own, which multiplies gradients on its way. A slot without a gradient is left alone."""

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        self._slots = {id(s.master): s for s in slots}
        self.gradient_scale = 1.0
        super().__init__(parameter_groups(slots, config.weight_decay), adam_defaults(config))


def parameter_groups(slots: Sequence[Slot], weight_decay: float) -> list[dict[str, Any]]:
    """torch.optim's groups: vectors (norms, biases) do not decay."""
    groups = [
        {"params": [s.master for s in slots if s.template.ndim >= 2], "weight_decay": weight_decay},
        {"params": [s.master for s in slots if s.template.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adam_defaults(config: OptimizerConfig) -> dict[str, Any]:
    """torch.optim.AdamW's names for the constants that all groups share."""
    return {"lr": config.learning_rate, "betas": config.betas, "eps": config.epsilon}
