"""Who computes what: the process group, the device mesh, and how a model is cut over it.

Callers: rill.training.engine. One code path serves any number of processes; with one process nothing here wraps or
communicates. Three axes:

    data      each rank has its own samples; parameters, gradients and optimizer state are sharded (FSDP2)
    context   ranks of one data rank hold slices of the same row; parameters are sharded over this axis too
    tensor    ranks of one data rank hold slices of the same matrices (DTensor plans from the model's own config)

With `expert_parallel` groups of data ranks divide the experts of a layer among them (rill.training.experts).

Gradients are summed, never averaged, over data and context: the trainer divides once by the global denominator.
"""

from __future__ import annotations

import copy
import datetime
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rill.errors import ConfigError, UnsupportedError, WeightSyncError
from rill.models.loading import reads_pictures
from rill.training.experts import spread_experts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How the ranks of one trainer find each other."""

    init_method: str | None = None
    """A torch.distributed address such as "tcp://host:port" or "file:///path"."""
    open_store: Callable[[float], Any] | None = None
    """Instead of an address: makes, from a deadline in seconds, the store of torch.distributed where they meet."""
    rank: int
    world_size: int
    timeout_s: float = 3600.0
    """Deadline of every collective. Ranks wait in one for whoever still waits for samples: not shorter than a step."""


class World:
    """This process's place in the mesh; without a mesh, one process alone."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        device: torch.device,
        *,
        owns_group: bool = False,
        experts: DeviceMesh | None = None,
    ) -> None:
        self.mesh = mesh
        self.experts = experts
        """The same ranks as "replica" × "expert", where experts are divided among them."""
        self.device = device
        self._owns_group = owns_group
        self._host_group: Any = None
        _make_current(device)

    @staticmethod
    def join(
        rendezvous: Rendezvous | None,
        device: torch.device,
        *,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        expert_parallel: int = 1,
    ) -> World:
        """Join the ranks of `rendezvous`; without one, use the process group that exists, or be alone."""
        owns_group = False
        _make_current(device)  # before the first collective
        if rendezvous is not None and not dist.is_initialized():
            owns_group = True
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=rendezvous.init_method,
                store=rendezvous.open_store and rendezvous.open_store(rendezvous.timeout_s),
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=datetime.timedelta(seconds=rendezvous.timeout_s),
            )
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        unit = tensor_parallel * context_parallel
        if world_size % unit:
            raise ConfigError(
                f"{world_size} ranks cannot be cut into tensor_parallel {tensor_parallel} × context_parallel "
                f"{context_parallel}: use a multiple of {unit} ranks or lower one of them"
            )
        if world_size % expert_parallel:
            raise ConfigError(
                f"{world_size} ranks cannot be cut into groups of expert_parallel {expert_parallel}: use a multiple"
            )
        if world_size == 1:
            return World(None, device, owns_group=owns_group)
        mesh = init_device_mesh(
            device.type,
            (world_size // unit, context_parallel, tensor_parallel),
            mesh_dim_names=("data", "context", "tensor"),
        )
        experts = None
        if expert_parallel > 1:
            shape = (world_size // expert_parallel, expert_parallel)
            experts = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "expert"))
        return World(mesh, device, owns_group=owns_group, experts=experts)

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank trains on; ranks of one data rank must get the same samples."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("data")

    @property
    def data_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["data"].size()

    @property
    def context_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["context"].size()

    @property
    def tensor_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["tensor"].size()

    @property
    def shards(self) -> bool:
        """Parameters are cut over data × context. A mesh of one rank, which only a caller that wants every collective
        to run makes (World.join does not), counts as cut."""
        return self.mesh is not None and (self.size == 1 or self.data_size * self.context_size > 1)

    def context(self) -> tuple[int, int, object] | None:
        """(rank, size, group) for packing, or None without context parallelism."""
        if self.mesh is None or self.context_size == 1:
            return None
        return self.mesh.get_local_rank("context"), self.context_size, self.mesh.get_group("context")

    @property
    def leads(self) -> bool:
        """This rank is the first of those that compute one data rank together: it reads and writes for them."""
        return self.mesh is None or not any(self.mesh.get_local_rank(axis) for axis in ("context", "tensor"))

    def from_leader(self, value: T | None) -> T:
        """What the leading rank of this data rank passes in, on all ranks that compute it together. A collective."""
        box = [value]
        for axis in ("tensor", "context"):  # the leader's tensor ranks first, then from each of those
            if self.mesh is not None and self.mesh[axis].size() > 1:
                dist.broadcast_object_list(box, group_src=0, group=self.mesh.get_group(axis))
        assert box[0] is not None, "the leading rank passes a value"
        return box[0]

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Summed over data ranks; a host tensor comes back as one, whatever device the ranks talk by."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_over_data(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Return when all ranks are here."""
        if self.mesh is not None:
            self._host_group = self._host_group or dist.new_group(backend="gloo")
            dist.barrier(group=self._host_group)

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.mesh is None:
            return values
        moved = values.to(self.device)  # NCCL knows no host memory
        dist.all_reduce(moved, op=op, group=self.mesh.get_group("data"))
        return moved.to(values.device)


def _make_current(device: torch.device) -> None:
    """Triton launches, and nccl moves objects, on the current device."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def shard_model(
    model: nn.Module, layers: Sequence[nn.Module], world: World, *, compute_dtype: torch.dtype, reshard: bool
) -> None:
    """FSDP2 over data × context, one unit per layer and one for the rest. Parameters stay in float32."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    assert world.mesh is not None
    # Fused layers return a view of one row; nothing writes to it in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    mesh = world.mesh["data", "context"]._flatten("shard") if world.context_size > 1 else world.mesh["data"]
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    if world.experts is not None:
        for experts in spread_experts(model, world.experts):
            fully_shard(
                experts,
                mesh=world.experts["replica"],
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda _: Shard(1),
            )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # NCCL can premultiply; gloo cannot. A plain sum is right on both.
            module.set_force_sum_reduction_for_comms(True)


def apply_tensor_parallel(model: Any, world: World) -> None:
    """Cut the decoder's matrices by the architecture's own plan (transformers' base_model_tp_plan)."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert world.mesh is not None
    config = model.config.get_text_config()
    if reads_pictures(model.config):
        raise UnsupportedError(
            f"{model.config.model_type}: a model with a vision tower needs tensor_parallel = 1"
        )
    # Embeddings, in the plans of models that tie them to the head, stay whole like the head itself.
    plan = {
        name: style
        for name, style in (config.base_model_tp_plan or {}).items()
        if style != "embedding_rowwise"
    }
    if not plan:
        raise UnsupportedError(
            f"{config.model_type} has no tensor-parallel plan in transformers: use tensor_parallel = 1"
        )
    size = world.tensor_size
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = config.to_dict().get(name)
        if number is not None and number % size:
            raise ConfigError(f"tensor_parallel {size} does not divide the model's {name} {number}")
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    }
    replicated = [name for name, style in plan.items() if style == "replicated_with_grad_allreduce"]
    plan = {name: style for name, style in plan.items() if name not in replicated}
    unknown = {style for style in plan.values() if style not in styles}
    if unknown:
        raise UnsupportedError(
            f"{config.model_type}'s tensor-parallel plan has styles {sorted(unknown)}, rill carries out "
            f"{sorted(styles)}: use tensor_parallel = 1"
        )
    parallelize_module(
        model.base_model, world.mesh["tensor"], {name: styles[style] for name, style in plan.items()}
    )
    group = world.mesh.get_group("tensor")
    for name, module in model.base_model.named_modules():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in replicated):
            _sum_weight_gradient(module, group)


def _sum_weight_gradient(module: Any, group: Any) -> None:
    """A norm of single heads sees this rank's heads only: its weight's gradient is the sum over the ranks."""
    bare = copy.copy(module)

    def forward(hidden: Tensor) -> Any:
        weight = _SumGradient.apply(module.weight, group)  # type: ignore[no-untyped-call]
        return torch.func.functional_call(bare, {"weight": weight}, (hidden,))

    module.forward = forward


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a possibly distributed tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(local_part: Tensor, template: Tensor) -> Tensor:
    """A tensor distributed as `template` is, whose part on this rank is `local_part`."""
    if not isinstance(template, DTensor):
        return local_part
    return DTensor.from_local(
        local_part,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; a collective when it is distributed."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_slice(whole: Tensor, template: Tensor) -> Tensor:
    """This rank's part of `whole`, cut as `template` is; no communication."""
    if not isinstance(template, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, template.device_mesh, template.placements, src_data_rank=None).to_local()


@torch.no_grad()
def copy_weights(own: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole weights in by name; each rank keeps its part. WeightSyncError: one belongs to another model, or is
    missing."""
    missing = set(own)
    for name, tensor in tensors:
        if name not in own or own[name].shape != tensor.shape:
            raise WeightSyncError(f"{name} {tuple(tensor.shape)} does not belong to this model")
        part = local(own[name])
        part.copy_(local_slice(tensor.to(part.device), own[name]))
        missing.discard(name)
    if missing:
        raise WeightSyncError(f"{len(missing)} weights were not given, {min(missing)} among them")


def gradient_norm(parameters: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """L2 norm over all ranks of (template parameter, local gradient) pairs, each element counted once."""
    sums: dict[tuple[Any, ...], list[Tensor]] = {}
    groups: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for template, grad in parameters:
        key: tuple[Any, ...] = ()
        if isinstance(template, DTensor):
            sharded = tuple(
                template.device_mesh.get_group(dim)
                for dim, placement in enumerate(template.placements)
                if not isinstance(placement, Replicate)
            )
            key = tuple(id(group) for group in sharded)
            groups[key] = sharded
        sums.setdefault(key, []).append(grad)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for key, grads in sums.items():
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        square = norms.square().sum()
        for group in groups.get(key, ()):
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()
