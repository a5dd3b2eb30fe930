"""The settings that every trainer has, and which of them exclude one another.

Owners: TrainEngine reads them; the trainers' own Config classes add theirs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rill.config import Config
from rill.models.loading import ModelConfig
from rill.models.lora import LoRAConfig
from rill.models.train.head import KEEP_BYTES
from rill.training.schedule import Schedule
from rill.training.slots import OptimizerConfig

Precision = Literal["float32", "bfloat16"]


class EngineConfig(Config):
    """What every trainer has in common."""

    model: ModelConfig
    compute_dtype: Precision = "float32"
    """Precision of the forward and backward pass. What is optimised is always float32: small updates would be lost."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Schedule = Schedule()
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Gradients are scaled down to this norm. 0: off."""
    micro_batch_tokens: int = Field(default=16_384, ge=2)
    """Most tokens in one forward pass of one rank. A longer sequence cannot be trained on: see on_too_long."""
    on_too_long: Literal["error", "skip"] = "error"
    """A sequence over micro_batch_tokens: InvalidSampleError, or left out, counted and logged."""
    on_nonfinite: Literal["error", "skip"] = "error"
    """A loss or gradient norm that is not finite: TrainingError, or the step is skipped, counted and logged.
    Weights and optimizer state stay as they were in both cases."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` recomputes each layer in the backward pass; `selective` keeps matrix products and attention."""
    compile: bool = False
    """torch.compile each layer."""
    activation_memory_budget: float = Field(default=1.0, gt=0.0, le=1.0)
    """With compile: the share of a layer's activations that may be kept; below 1 the cheapest are recomputed."""
    quantization_aware: Literal["int4"] | None = None
    """Compute with the layers' weights as an engine with `quantization` holds them; gradients are those of the weights
    themselves. Unset: int4 where the rollout's engine has it."""
    fp8: bool = False
    """The layers' products in 8 bits, but for those of weight gradients: faster from Hopper on, rounded elsewhere."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters and freeze the rest. Unset: everything is trained."""
    freeze_vision: bool = False
    """Leave the tower of a vision-language model as it is, and train the rest. With lora it is left anyway."""
    tensor_parallel: int = Field(default=1, ge=1)
    context_parallel: int = Field(default=1, ge=1)
    expert_parallel: int = Field(default=1, ge=1)
    """So many data ranks divide each layer's experts among them, and tokens travel. Needs a model with experts."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass (ZeRO-3); false keeps them until backward (ZeRO-2)."""
    tree_packing: bool = False
    """Compute the shared prompt of a group once per micro-batch. Changes no gradient."""
    head_chunk_bytes: int = Field(default=256 * 2**20, ge=1)
    """Most bytes of float32 logits alive at one time."""
    head_keep_bytes: int = Field(default=KEEP_BYTES, ge=0)
    """Logits of a whole micro-batch up to this size stay until the backward pass instead of being computed twice."""

    @model_validator(mode="after")
    def _combines(self) -> EngineConfig:
        if self.tree_packing and self.context_parallel > 1:
            raise ValueError(
                "tree_packing and context_parallel exclude each other: a shared prefix cannot be cut"
            )
        if self.quantization_aware and (self.lora is not None or self.tensor_parallel > 1):
            raise ValueError(
                "quantization_aware needs whole, trained weights: no lora, and tensor_parallel = 1"
            )
        if self.fp8 and (self.quantization_aware or self.lora is not None or self.tensor_parallel > 1):
            raise ValueError(
                "fp8 multiplies whole, trained weights: no lora, no quantization_aware, and tensor_parallel = 1"
            )
        if self.lora is not None and self.tensor_parallel > 1:
            raise ValueError("lora with tensor_parallel > 1 is not supported: set tensor_parallel = 1")
        if self.expert_parallel > 1 and (
            self.tensor_parallel > 1 or self.context_parallel > 1 or self.lora is not None
        ):
            raise ValueError(
                "expert_parallel > 1 goes with data ranks alone: set tensor_parallel = 1 and context_parallel = 1, and "
                "no lora"
            )
        if self.activation_memory_budget < 1.0 and not self.compile:
            raise ValueError(
                f"activation_memory_budget = {self.activation_memory_budget} is kept by compiled layers: set compile = "
                "true, or use activation_checkpointing"
            )
        return self


class MiniBatchConfig(EngineConfig):
    """Of trainers that may take several optimizer steps on one batch; see rill.training.step."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    seed: int = 0
    """Order of the mini-batches."""
