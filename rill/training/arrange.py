"""How a module's layers are cut, multiplied, recomputed, compiled and sharded. Callers: TrainEngine and FrozenModel,
whose numbers must agree."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from rill.errors import ConfigError
from rill.models.ops.int4 import check_groups, rounded_int4
from rill.models.train.attention_packed import compile_decoder
from rill.models.train.fp8_products import replace_products_fp8
from rill.models.train.fused_mlp import fuse_mlps, has_fused_mlp
from rill.models.train.joined_products import join_products
from rill.models.train.products import GradientSums, replace_products
from rill.training.module import PackedModule
from rill.training.parallel import World, apply_tensor_parallel, shard_model
from rill.training.recompute import recompute_layer


def arrange(
    module: PackedModule,
    world: World,
    *,
    dtype: torch.dtype,
    compiled: bool,
    quantization_aware: bool,
    fp8: bool,
    shards: bool,
    reshard: bool = True,
    checkpointing: Literal["none", "selective", "full"] = "none",
    sums: GradientSums | None = None,
) -> None:
    """In the order in which these compose. `sums`: where float32 weight gradients are added up."""
    if world.tensor_size > 1:
        apply_tensor_parallel(module.lm, world)
    _arrange_products(
        module,
        world,
        dtype=dtype,
        is_compiled=compiled,
        quantization_aware=quantization_aware,
        fp8=fp8,
        sums=sums,
    )
    layers = list(module.layers)
    if checkpointing != "none":
        for layer in layers:
            recompute_layer(layer, checkpointing)
    if compiled:
        compile_decoder(module.lm)
    if shards:
        shard_model(module, layers, world, compute_dtype=dtype, reshard=reshard)


def _arrange_products(
    module: PackedModule,
    world: World,
    *,
    dtype: torch.dtype,
    is_compiled: bool,
    quantization_aware: bool,
    fp8: bool,
    sums: GradientSums | None,
) -> None:
    is_whole = world.tensor_size == 1
    if is_whole and world.device.type == "cpu" and not is_compiled:
        replace_products(module.lm, sums)
    if quantization_aware:
        check_groups([m.weight for m in module.layers.modules() if isinstance(m, nn.Linear)])
        replace_products(module.layers, sums, rounded_int4)
    elif fp8:
        if not is_whole:
            raise ConfigError("fp8 multiplies whole matrices: set tensor_parallel = 1")
        replace_products_fp8(module.layers, sums)
    elif is_whole and dtype == torch.bfloat16 and has_fused_mlp(world.device):
        fuse_mlps(module.layers)
    if is_whole and world.device.type == "cuda":
        join_products(module.layers)
