"""The optimizer that an engine steps: one or two torch.optim parts over the slots, and their state by parameter name.

Callers: rill.training.engine, rill.training.checkpoint through it.

    adamw       one pass over memory: adamw_triton (bf16 copies on one GPU); torch's fused one elsewhere
    adamw8bit   adamw_triton likewise, adamw8bit elsewhere
    muon        muon on the decoder's matrices, AdamW on the rest
    sgd         torch's
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rill.training.adamw8bit import MOMENTS, EightBitAdamW, decoded, is_coded, write
from rill.training.muon import Muon
from rill.training.offload import pinned_like
from rill.training.slots import OptimizerConfig, Slot, SlotAdamW, adam_defaults, parameter_groups

if TYPE_CHECKING:
    from rill.training.adamw_triton import CopyingAdamW


class Optimizer:
    """What `config.type` names, on the slots."""

    def __init__(self, config: OptimizerConfig, slots: Sequence[Slot]) -> None:
        self.config = config
        self.slots = list(slots)
        self._by_master = {id(s.master): s for s in self.slots}
        self._parts: list[torch.optim.Optimizer] = []
        matrices = [s for s in self.slots if s.is_matrix] if config.type == "muon" else []
        if matrices:
            self._parts.append(Muon(matrices, config))
        others = [s for s in self.slots if config.type != "muon" or not s.is_matrix]
        self._copying: CopyingAdamW | None = None
        """Then it is the only part."""
        if _can_copy(config, self.slots):
            from rill.training.adamw_triton import CopyingAdamW

            self._copying = CopyingAdamW(others, config)
            self._parts.append(self._copying)
        elif others:
            self._parts.append(_elementwise(config, others))

    @property
    def takes_copies(self) -> bool:
        """step() reads gradients in the precision they came in and writes the module's copies itself."""
        return self._copying is not None

    def prepare(self) -> None:
        """Do what can be done of the next step() before its rate and scale are known. May be left out; gradients do
        not change between the two."""
        if self._copying is not None:
            self._copying.prepare()

    def gradient_norm(self) -> Tensor | None:
        """L2 norm of the gradients that prepare() found, this rank's parts; None where it has no way of its own."""
        return None if self._copying is None else self._copying.gradient_norm()

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
        """Parameter name → state key → the tensor itself, as the optimizer holds it."""
        return {
            self._by_master[id(master)].name: dict(state)
            for part in self._parts
            for master, state in part.state.items()
        }

    def template(self, name: str) -> Tensor:
        return next(s.template for s in self.slots if s.name == name)

    @property
    def is_coded(self) -> bool:
        """Moments have 8 bits, and are decoded for a checkpoint."""
        return any(is_coded(state) for state in self.state_tensors().values())

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """state_tensors() with 8-bit moments decoded: what a checkpoint holds, whatever the type of AdamW."""
        if self.config.offload_state and torch.cuda.is_available():
            torch.cuda.synchronize()  # the last step's state may still be on its way to the host
        states = self.state_tensors()
        for name, state in states.items():
            if is_coded(state):
                # One process would have to hold them all at once; its host has room.
                is_sharded = isinstance(self.template(name), DTensor)
                plain = {key: value if is_sharded else value.cpu() for key, value in decoded(state).items()}
                states[name] = {"step": state["step"], **plain}
        return states

    def load_plain_state(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Encode again what a checkpoint wrote into the tensors of plain_state(). The rest was written in place."""
        for name, state in self.state_tensors().items():
            if is_coded(state):
                write(state, {key: states[name][key].to(state[key].device) for key in MOMENTS})

    @staticmethod
    def _scale(part: torch.optim.Optimizer, scale: float) -> None:
        """The fused kernel divides by a tensor on its way (torch's protocol for gradient scalers); others first."""
        if isinstance(part, SlotAdamW):
            part.gradient_scale = scale  # and no list of gradients, for which the device would wait
            return
        masters = [m for group in part.param_groups for m in group["params"] if m.grad is not None]
        if isinstance(part, torch.optim.AdamW):
            device = masters[0].device if masters else torch.device("cpu")
            part.grad_scale = torch.full((), 1.0 / scale, device=device)  # type: ignore[attr-defined]
            part.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        elif masters and scale != 1.0:
            torch._foreach_mul_([m.grad for m in masters], scale)

    def _step_streamed(self, part: torch.optim.Optimizer) -> None:
        """A step for each parameter, its state on the device only meanwhile. Transfers are queued, none is waited for:
        what the host holds is whole once the device has caught up (see plain_state)."""
        groups = part.param_groups
        for group in groups:
            for master in group["params"]:
                part.param_groups = [{**group, "params": [master]}]
                state = part.state[master]
                resting = {key: v for key, v in state.items() if v.ndim > 0}
                for key, host in resting.items():
                    state[key] = host.to(master.device, non_blocking=True)
                part.step()
                for key, value in state.items():
                    if value.ndim > 0 and value.device.type != "cpu":
                        host = resting[key] if key in resting else pinned_like(value)
                        state[key] = host.copy_(value, non_blocking=True)
        part.param_groups = groups


def _can_copy(config: OptimizerConfig, slots: Sequence[Slot]) -> bool:
    return (
        config.one_pass
        and config.type in ("adamw", "adamw8bit")
        and not config.offload_state
        and all(s.has_copy and s.master.is_cuda for s in slots)
        and find_spec("triton") is not None
    )


def _elementwise(config: OptimizerConfig, slots: Sequence[Slot]) -> torch.optim.Optimizer:
    if config.type == "adamw8bit":
        return EightBitAdamW(slots, config)
    groups = parameter_groups(slots, config.weight_decay)
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    return torch.optim.AdamW(groups, **adam_defaults(config), fused=True)
