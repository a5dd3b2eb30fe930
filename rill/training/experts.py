"""Expert parallelism: a rank holds some of each layer's experts, and tokens travel to them.

Callers: rill.training.parallel. Data ranks are cut into groups of `expert_parallel`, whose ranks divide the experts of
a layer among them. Several such groups shard what they both hold (FSDP2), as all ranks do with everything else.

    T tokens × K choices ─▶ in the order of experts ─▶ all-to-all ─▶ this rank's experts ─▶ all-to-all ─▶ weighted sum

It serves every architecture whose experts are stacked in parameters [E, …] and called with tokens, choices and weights,
as transformers writes them. Routers, shared experts and replayed choices are not touched. Each group exchanges the same
number of times in a pass, whoever has tokens: ranks without samples run idle packs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rill.errors import ConfigError, UnsupportedError
from rill.models.routing import expert_blocks


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Keep this rank's experts and send tokens to the others'. The modules, whose parameters are cut now.

    mesh: "replica" × "expert". FSDP2 shards the second axis of each parameter over "replica".
    """
    num_replicas, size = mesh["replica"].size(), mesh["expert"].size()
    modules: list[nn.Module] = [block.experts for block in expert_blocks(model)]
    if not modules:
        raise ConfigError(f"expert_parallel = {size}, and the model has no experts: set expert_parallel = 1")
    for experts in modules:
        stacked = dict(experts.named_parameters(recurse=False))
        number = int(getattr(experts, "num_experts", 0))
        if not stacked or any(p.shape[0] != number for p in stacked.values()):
            raise UnsupportedError(
                f"{type(experts).__name__} does not stack its experts in one parameter: set expert_parallel = 1"
            )
        if number % size:
            raise ConfigError(f"expert_parallel {size} does not divide the model's {number} experts")
        if any(p.shape[1] % num_replicas for p in stacked.values()):
            raise ConfigError(
                f"{num_replicas} groups of expert_parallel {size} ranks do not divide the width of "
                f"{type(experts).__name__}: use another number of ranks"
            )
        own_forward = travelling(experts, mesh, number // size)
        for name, parameter in stacked.items():
            part = parameter.detach().chunk(size)[mesh.get_local_rank("expert")].clone()
            cut = DTensor.from_local(part, mesh["expert"], [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        experts.forward = own_forward
    return modules


def travelling(experts: nn.Module, mesh: DeviceMesh, num_local: int) -> Callable[..., Tensor]:
    """The module's forward, for tokens of all ranks of the group."""
    group, size = mesh.get_group("expert"), mesh["expert"].size()
    bare: Any = copy.copy(experts)
    bare._parameters = {}  # plain tensors take their place, call by call
    bare.num_experts = num_local
    compute = type(experts).forward

    def forward(hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_choices = chosen_TK.shape[1]
        order_S = chosen_TK.reshape(-1).argsort(stable=True)
        sent_RE = torch.bincount(chosen_TK.reshape(-1), minlength=size * num_local).view(size, num_local)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=group)
        there, here = sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()
        rows_ND = _Exchange.apply(hidden_TD[order_S // num_choices], here, there, group)  # type: ignore[no-untyped-call]
        local_N = torch.arange(num_local, device=hidden_TD.device).repeat(size)
        local_N = local_N.repeat_interleave(received_RE.reshape(-1))
        # One more row, of zeros: weights that no token came to have a gradient too, and FSDP waits for nobody.
        rows_ND = torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])
        local_N1 = torch.cat([local_N, local_N.new_zeros(1)])[:, None]
        held = {name: parameter.to_local() for name, parameter in experts._parameters.items()}  # type: ignore[union-attr]
        bare.__dict__.update(held)
        done_ND = compute(bare, rows_ND, local_N1, weights_TK.new_ones(local_N1.shape))[:-1]
        for name in held:
            del bare.__dict__[name]
        back_SD = _Exchange.apply(done_ND, there, here, group)  # type: ignore[no-untyped-call]
        by_token_TKD = back_SD[order_S.argsort()].view(*chosen_TK.shape, -1)
        total_TD: Tensor = (by_token_TKD * weights_TK[..., None]).sum(1)
        return total_TD.to(hidden_TD.dtype)

    return forward


class _Exchange(torch.autograd.Function):
    """Rows to where they are wanted, gradients back; `here` and `there`: how many from and to each rank."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, here: list[int], there: list[int], group: Any) -> Tensor:
        ctx.here, ctx.there, ctx.group = here, there, group
        return _exchanged(rows_SD, here, there, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchanged(grads[0], ctx.there, ctx.here, ctx.group), None, None, None


def _exchanged(rows_SD: Tensor, here: list[int], there: list[int], group: Any) -> Tensor:
    found_ND = rows_SD.new_empty(sum(here), rows_SD.shape[1])
    dist.all_to_all_single(found_ND, rows_SD.contiguous(), here, there, group=group)
    return found_ND
