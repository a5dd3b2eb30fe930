"""Optimizers over the local float32 parts of parameters.

Callers: rill.training.engine. An optimizer sees plain tensors, never how a parameter is distributed; element-wise
updates need no more. Muon, which works on whole matrices, gets the distributed view through `Slot.template`.
Vectors (norms, biases) have no weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from rill.config import Config
from rill.errors import MissingExtraError
from rill.models.cpu_training import TrainingKernels, load_training_kernels
from rill.training.adamw_cpu import CpuAdamW
from rill.training.parallel import full, like, local, local_slice


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
    """`adamw8bit` needs torchao. `muon` uses AdamW for everything that is not a decoder matrix."""
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled. 0: off."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Of Muon (Nesterov) and SGD."""
    one_pass: bool = True
    """AdamW with bf16 compute on one CUDA device with Triton: scale, update and copy in one kernel, which also reads
    bf16 gradients as they are. Saves about a third of the optimizer's memory traffic. Elsewhere it means nothing."""
    offload_state: bool = False
    """Keep optimizer state in host memory and stream it through the device each step. Saves 8 bytes a parameter."""


@runtime_checkable
class _ScalesItself(Protocol):
    gradient_scale: float


@runtime_checkable
class _Prepares(Protocol):
    def prepare(self) -> None: ...


class Optimizer:
    """AdamW, 8-bit AdamW or SGD on the slots; Muon on matrices. State is addressed by parameter name."""

    def __init__(self, config: OptimizerConfig, slots: Sequence[Slot]) -> None:
        self.config = config
        self.slots = list(slots)
        self._by_master = {id(s.master): s for s in self.slots}
        self._parts: list[torch.optim.Optimizer] = []
        matrices = [s for s in self.slots if s.is_matrix] if config.type == "muon" else []
        if matrices:
            self._parts.append(Muon(matrices, config))
        others = [s for s in self.slots if config.type != "muon" or not s.is_matrix]
        self.takes_copies = _can_copy(config, self.slots)
        """True: step() reads gradients in the precision they came in and writes the module's copies itself."""
        if self.takes_copies:
            from rill.training.adamw_triton import CopyingAdamW

            self._parts.append(CopyingAdamW(others, config))
        elif others and (kernels := _cpu_kernels(config, others)) is not None:
            self.takes_copies = not matrices
            self._parts.append(CpuAdamW(others, config, kernels))
        elif others:
            self._parts.append(_elementwise(config, others))

    def prepare(self) -> None:
        """Do what can be done of the next step() before its rate and scale are known. May be left out."""
        for part in self._parts:
            if isinstance(part, _Prepares):
                part.prepare()

    def step(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """One step with every gradient multiplied by `gradient_scale`."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            self._scale(part, gradient_scale)
            if self.config.offload_state:
                self._step_streamed(part)
            else:
                part.step()

    def state_tensors(self) -> dict[str, dict[str, Any]]:
        """name → state key → tensor (distributed as its parameter where the shapes agree)."""
        return {
            self._by_master[id(master)].name: dict(state)
            for part in self._parts
            for master, state in part.state.items()
        }

    def template(self, name: str) -> Tensor:
        return next(s.template for s in self.slots if s.name == name)

    def load_state(self, states: dict[str, dict[str, Any]]) -> None:
        by_name = {s.name: s for s in self.slots}
        for part in self._parts:
            masters = {id(m) for group in part.param_groups for m in group["params"]}
            part.state.clear()
            for name, state in states.items():
                master = by_name[name].master
                if id(master) in masters:
                    part.state[master] = dict(state)

    @staticmethod
    def _scale(part: torch.optim.Optimizer, scale: float) -> None:
        """The fused kernel divides by a tensor on its way (torch's protocol for gradient scalers); others first."""
        masters = [m for group in part.param_groups for m in group["params"] if m.grad is not None]
        if isinstance(part, torch.optim.AdamW):
            device = masters[0].device if masters else torch.device("cpu")
            part.grad_scale = torch.full((), 1.0 / scale, device=device)  # type: ignore[attr-defined]
            part.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        elif isinstance(part, _ScalesItself):
            part.gradient_scale = scale
        elif masters and scale != 1.0:
            torch._foreach_mul_([m.grad for m in masters], scale)

    def _step_streamed(self, part: torch.optim.Optimizer) -> None:
        """One step per parameter group slice with state on the device only while it is used."""
        groups = part.param_groups
        for group in groups:
            params = group["params"]
            for master in params:
                part.param_groups = [{**group, "params": [master]}]
                _move_state(part.state[master], master.device)
                part.step()
                _move_state(part.state[master], torch.device("cpu"))
        part.param_groups = groups


def _can_copy(config: OptimizerConfig, slots: Sequence[Slot]) -> bool:
    return (
        config.one_pass
        and config.type == "adamw"
        and not config.offload_state
        and all(s.has_copy and s.master.is_cuda for s in slots)
        and find_spec("triton") is not None
    )


def _cpu_kernels(config: OptimizerConfig, slots: Sequence[Slot]) -> TrainingKernels | None:
    """The C++ kernels, where AdamW can run on them."""
    masters = [s.master for s in slots]
    is_host = all(m.device.type == "cpu" and m.dtype == torch.float32 and m.is_contiguous() for m in masters)
    if config.type not in ("adamw", "muon") or config.offload_state or not is_host:
        return None
    return load_training_kernels()


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            state[key] = value.to(device, non_blocking=device.type == "cuda")


def _elementwise(config: OptimizerConfig, slots: Sequence[Slot]) -> torch.optim.Optimizer:
    groups = [
        {"params": [s.master for s in slots if s.template.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [s.master for s in slots if s.template.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    if config.type == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise MissingExtraError(
                "optimizer.type = 'adamw8bit' needs torchao: pip install torchao"
            ) from None
        eight_bit: torch.optim.Optimizer = AdamW8bit(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon
        )
        return eight_bit
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=True
    )


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton–Schulz:  W ← W − lr · 0.2 · sqrt(max(rows, columns)) · orthogonal(M).

    The factor gives updates the size of AdamW's, so both share one learning rate. A sharded matrix is gathered, the
    iteration runs on the whole of it on every rank, and each rank keeps its part.
    """

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        self._slots = {id(s.master): s for s in slots}
        super().__init__(
            [s.master for s in slots],
            {"lr": config.learning_rate, "momentum": config.momentum, "weight_decay": config.weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                # A rank whose shard of an uneven matrix is empty still takes part in the gather.
                state = self.state[master]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(master)
                grad = master.grad if master.grad is not None else torch.zeros_like(master)
                state["momentum"].lerp_(grad, 1 - group["momentum"])
                nesterov = grad.lerp(state["momentum"], group["momentum"])
                template = self._slots[id(master)].template
                whole = full(like(nesterov, template))
                update = local_slice(orthogonalise(whole).to(master.dtype), template)
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.add_(update, alpha=-group["lr"] * 0.2 * max(whole.shape) ** 0.5)


def orthogonalise(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """An approximate U Vᵀ of matrix = U S Vᵀ by a quintic Newton–Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
