"""The engine under every trainer: a packed module, its float32 master weights, and one optimizer step.

Callers: PolicyTrainer, ValueTrainer, RewardTrainer, SFTTrainer. The engine knows neither rewards nor losses.

    accumulate gradients  backward(numerator)   any number of times, over any split
    finish                step(denominator)     reduce, divide once, clip, optimise, version + 1

Guarantees: the gradient does not depend on how a batch was split over calls or ranks; a step whose loss or norm is
not finite changes nothing; one process without a process group runs the same code without wrappers.

Precision. `compute` float32: the module's parameters are the masters. `compute` bfloat16 on one process: the module
holds bf16 copies and gradients are added up in float32 beside the masters. Sharded: FSDP2 keeps float32 shards,
gathers bf16, and reduces gradients in float32. The arithmetic is the same in the last two.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rill.errors import TrainingError
from rill.models.loading import DTYPES
from rill.models.lora import add_lora, merged_weights
from rill.models.train.fused_mlp import keep_by_turns
from rill.training.arrange import arrange
from rill.training.engine_config import EngineConfig
from rill.training.host_memory import keep_freed_memory
from rill.training.module import LM_PREFIX, PackedModule
from rill.training.offload import Shelf
from rill.training.optim import Optimizer
from rill.training.parallel import World, full, gradient_norm, like, local
from rill.training.slots import Slot
from rill.types import PolicyVersion

log = logging.getLogger(__name__)


class TrainEngine:
    """Owns the module, the masters, the optimizer and the version."""

    def __init__(self, config: EngineConfig, module: PackedModule, world: World) -> None:
        """`module` is on the world's device in float32; it is changed in place."""
        self.config = config
        self.world = world
        self.device = world.device
        self.module = module
        self.compute_dtype = DTYPES[config.compute_dtype]
        self.num_skipped_steps = 0
        self._version = 0
        self.shelf = Shelf()
        self._until_read: Callable[[], None] | None = None
        if self.device.type == "cpu":
            keep_freed_memory()
        if config.lora is not None:
            add_lora(module.lm, config.lora)
        self._arrange()
        self.slots = self._make_slots()
        if not self.slots:
            raise TrainingError("the model has no trainable parameter")
        self._by_template = {id(s.template): s for s in self.slots}
        self.optimizer = Optimizer(config.optimizer, self.slots)
        if self.optimizer.takes_copies:
            keep_by_turns(module.layers)

    # --- training -----------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self._version)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.config.optimizer.learning_rate * self.config.schedule.factor(self._version)

    def backward(self, numerator: Tensor) -> None:
        """Add the gradient of `numerator` to what has been accumulated."""
        self._fold()  # else autograd would add up in bfloat16
        numerator.backward()  # type: ignore[no-untyped-call]

    def gradient_norm(self) -> Tensor:
        """L2 norm of the accumulated gradient over all ranks, not yet divided. Does not wait for the device."""
        self._collect_gradients()
        self.optimizer.prepare()
        norm = self.optimizer.gradient_norm() if self.world.size == 1 else None
        if norm is None:
            pairs = ((s.template, s.gradient()) for s in self.slots)
            norm = gradient_norm([(t, g) for t, g in pairs if g is not None], self.device)
        return norm

    def step(
        self,
        denominator: float,
        *,
        is_finite: bool = True,
        learning_rate: float | None = None,
        norm: float | None = None,
        reason: str = "",
    ) -> dict[str, float]:
        """One optimizer step with gradient / denominator; all ranks pass the same global values.

        `learning_rate` takes the place of the schedule's; `norm` is gradient_norm() where the caller has read it;
        `reason` is what this rank knows of a loss that is not finite.
        """
        self._wait_until_read()
        size = (self.gradient_norm().item() if norm is None else norm) / denominator
        is_finite = is_finite and math.isfinite(size)
        rate = self.learning_rate if learning_rate is None else learning_rate
        if not is_finite:
            self.zero_gradients()
            self.optimizer.prepare()  # of nothing: it lets go of the gradients
            self.num_skipped_steps += 1
            why = f" ({reason})" if reason else ""
            what = f"step {self._version + 1}: the loss or gradient norm ({size}) is not finite{why}"
            message = f"{what}; nothing was changed"
            if self.config.on_nonfinite == "error":
                raise TrainingError(message + "; set on_nonfinite = 'skip' to go on after such steps")
            log.warning(message)
        else:
            limit = self.config.max_grad_norm
            scale = (min(1.0, limit / (size + 1e-6)) if limit else 1.0) / denominator
            if not self.optimizer.takes_copies:
                self._fold()
            self.optimizer.step(rate, scale)
            if not self.optimizer.takes_copies:
                self._publish_masters()
            self.zero_gradients()
            self._version += 1
        return {"grad_norm": size, "learning_rate": rate, "skipped_steps": float(self.num_skipped_steps)}

    def pass_over(self, num_steps: int) -> None:
        """Count steps in which nothing was trained."""
        self.zero_gradients()
        self._version += num_steps

    def restart_optimizer(self) -> None:
        """Drop optimizer state and count steps from 0 again: what follows a warm-up on other data."""
        self.optimizer = Optimizer(self.config.optimizer, self.slots)
        self._version = 0

    def zero_gradients(self) -> None:
        for slot in self.slots:
            slot.master.grad = None
            slot.template.grad = None

    def sum_of(self, weight: Tensor) -> tuple[Tensor, bool] | None:
        """Where 16-bit products add up a weight's float32 gradient, and whether there is some already: GradientSums."""
        slot = self._by_template.get(id(weight)) if self._has_copies else None
        if slot is None:
            return None
        is_begun = slot.master.grad is not None
        if slot.master.grad is None:
            slot.master.grad = torch.empty_like(slot.master)
        return slot.master.grad, is_begun

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradient by parameter name, whole, on every rank. For tests and inspection."""
        self._collect_gradients()
        self._fold()
        grads = (s.gradient() for s in self.slots)
        parts = (
            g if g is not None else torch.zeros_like(s.master) for s, g in zip(self.slots, grads, strict=True)
        )
        return {s.name: full(like(p, s.template)).clone() for s, p in zip(self.slots, parts, strict=True)}

    # --- weights ------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and whole tensor, in compute precision, adapters merged. A collective when sharded."""
        weights: Iterator[tuple[str, Tensor]] = (
            (name.removeprefix(LM_PREFIX), full(p.detach()).to(self.compute_dtype).contiguous())
            for name, p in self.module.named_parameters()
        )
        weights = itertools.chain(weights, self.module.stored_buffers())
        # No torch.no_grad() around a yield: it would hold in the caller's code. Detached tensors need none.
        if self.config.lora is not None:
            weights = merged_weights(weights, self.config.lora)
        yield from weights

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs, distributed tensors kept distributed."""
        state: dict[str, Any] = {f"master.{s.name}": like(s.master.detach(), s.template) for s in self.slots}
        if self.config.lora is None:
            trained = {s.name for s in self.slots}
            frozen = [(n, p) for n, p in self.module.named_parameters() if n not in trained]
            state.update({f"frozen.{n}": p.detach() for n, p in frozen})
        state.update({f"buffer.{name}": buffer for name, buffer in self.module.stored_buffers()})
        for name, values in self.optimizer.plain_state().items():
            template = self.optimizer.template(name)
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    value = torch.tensor(value)
                is_part = value.shape == local(template).shape and value.ndim > 0
                state[f"optimizer.{name}.{key}"] = like(value, template) if is_part else value
        return state

    def hold(self, until: Callable[[], None]) -> None:
        """Somebody reads state() by and by: before anything of it changes, `until` is called, which waits for that."""
        self._until_read = until

    def _wait_until_read(self) -> None:
        until, self._until_read = self._until_read, None
        if until is not None:
            until()

    def prepare_optimizer_state(self) -> None:
        """Create optimizer state before the first step, so that a checkpoint has somewhere to be loaded into: a step of
        no gradient at rate 0, which moves nothing and does not count."""
        known = self.optimizer.state_tensors()
        if all(slot.name in known for slot in self.slots):
            return
        for slot in self.slots:
            slot.master.grad = torch.zeros_like(slot.master)
        self.optimizer.step(0.0)
        for state in self.optimizer.state_tensors().values():
            for value in state.values():
                value.zero_()
        self.zero_gradients()

    def after_load(self, version: int, state: dict[str, Any]) -> None:
        """A checkpoint was written into the tensors of state(): bring optimizer, module and version in line."""
        values: dict[str, dict[str, Tensor]] = {}
        for address, value in state.items():
            kind, _, rest = address.partition(".")
            if kind == "optimizer":
                name, _, key = rest.rpartition(".")
                values.setdefault(name, {})[key] = local(value)
        self.optimizer.load_plain_state(values)
        self.module.forget_pictures()
        self._version = version
        self._publish_masters()

    # --- shared devices -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move optimizer state, gradients and parameters to host memory. Nothing to do on a CPU."""
        if self.device.type == "cpu":
            return
        self._wait_until_read()
        self.module.forget_pictures()
        states = self.optimizer.state_tensors().values()
        tensors = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        self._collect_gradients()
        self._fold()
        tensors += [s.master.grad for s in self.slots if s.master.grad is not None]
        self.shelf.drop(
            [local(s.template.detach()) for s in self.slots if s.has_copy]
        )  # the masters hold them
        tensors += [s.master for s in self.slots]
        tensors += [local(p.detach()) for p in self.module.parameters()]
        self.shelf.put([*tensors, *self.module.buffers()])
        torch.cuda.empty_cache()

    @property
    def rests_on_host(self) -> bool:
        """offload() has put all that state() names there, as a checkpoint holds it."""
        if not self.shelf.num_bytes:
            return False
        states = self.optimizer.state_tensors()
        is_plain = not (self.optimizer.is_coded or self.config.optimizer.offload_state)
        return is_plain and all(slot.name in states for slot in self.slots)

    def onload(self) -> None:
        """Bring back what offload() took. Nothing to do where there is nothing."""
        if self.shelf.num_bytes:
            self.shelf.take_all()
            self._publish_masters()

    # --- construction -------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        config = self.config
        if self.world.tensor_size == 1 and self.device.type == "cpu" and not config.compile:
            self.module.sums = self
        if config.compile:
            import torch._functorch.config as compiler  # seconds that a process without compiled layers can spare

            compiler.activation_memory_budget = config.activation_memory_budget
        arrange(
            self.module,
            self.world,
            dtype=self.compute_dtype,
            compiled=config.compile,
            quantization_aware=bool(config.quantization_aware),
            fp8=config.fp8,
            shards=self.world.shards,
            reshard=config.reshard_after_forward,
            checkpointing=config.activation_checkpointing,
            sums=self.module.sums,
        )

    def _make_slots(self) -> list[Slot]:
        """Masters for every trained parameter; bf16 copies and float32 accumulation where precision asks for it."""
        self._has_copies = not self.world.shards and self.compute_dtype != torch.float32
        slots: list[Slot] = []
        for name, parameter in self.module.named_parameters():
            master = local(parameter.detach())
            if self._has_copies:
                if parameter.requires_grad:
                    master = master.clone()
                _cast_in_place(parameter, self.compute_dtype)
            if not parameter.requires_grad:
                continue
            is_matrix = _is_decoder_matrix(self.module, name, parameter)
            slots.append(Slot(name, parameter, master, is_matrix, has_copy=self._has_copies))
        return slots

    def _collect_gradients(self) -> None:
        """Point every master's .grad at this rank's part of the gradient."""
        if self._has_copies:
            if any(s.master.grad is not None for s in self.slots):
                self._fold()
            return
        for slot in self.slots:
            if slot.template.grad is not None:
                slot.master.grad = local(slot.template.grad)

    @torch.no_grad()
    def _fold(self) -> None:
        """Add the low-precision gradients of one pass to the float32 ones beside the masters."""
        if not self._has_copies:
            return
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for slot in self.slots:
            if slot.template.grad is None:
                continue
            arrived = local(slot.template.grad)
            slot.template.grad = None
            if slot.master.grad is None:
                slot.master.grad = torch.empty_like(slot.master)
                fresh[0].append(slot.master.grad)
                fresh[1].append(arrived)
            else:
                added[0].append(slot.master.grad)
                added[1].append(arrived)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if added[0]:
            torch._foreach_add_(*added)

    @torch.no_grad()
    def _publish_masters(self) -> None:
        if self._has_copies:
            torch._foreach_copy_(
                [local(s.template.detach()) for s in self.slots], [s.master for s in self.slots]
            )


def _cast_in_place(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.data = parameter.data.to(dtype)


def _is_decoder_matrix(module: PackedModule, name: str, parameter: Tensor) -> bool:
    embeddings = {id(module.lm.get_input_embeddings().weight)}
    head = module.lm.get_output_embeddings()
    if head is not None:  # a value model has none
        embeddings.add(id(head.weight))
    return parameter.ndim == 2 and id(parameter) not in embeddings and "value_head" not in name
