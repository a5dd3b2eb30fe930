"""Chooses and builds the runner for a device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from rill.errors import ConfigError, UnsupportedError
from rill.inference.native.model_runner import CpuRunner, LoadedModel, ModelRunner, refusal
from rill.inference.native.self_check import Case, check_quantized, check_runner, expected_logits
from rill.models.decode.attention_paged import register_paged_attention
from rill.models.decode.shards import shard_model
from rill.models.decode.tensor_group import TensorGroup
from rill.models.eager import probe_model
from rill.models.loading import DTYPES, attention_of_parts, check_interface, load_model, reads_pictures
from rill.models.pictures import load_pictures
from rill.models.routing import Routing
from rill.models.vision import VisionTower

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rill.inference.native.engine import NativeEngine


def build_runner(
    config: NativeEngine.Config, model: PreTrainedModel | None, *, owns_model: bool = False
) -> ModelRunner:
    runner, expected = load_runner(config, model, owns_model=owns_model)
    check_runner(runner, expected)
    if config.is_quantized:
        if not (model is None or owns_model):
            raise ConfigError(
                "quantization changes weights, and somebody else holds these: give the engine its own"
            )
        runner.quantize(weights=config.quantization, cache=config.kv_cache_dtype == "fp8")
        check_quantized(runner, expected)
    return runner


def load_runner(
    config: NativeEngine.Config,
    model: PreTrainedModel | None,
    *,
    owns_model: bool = False,
    group: TensorGroup | None = None,
) -> tuple[ModelRunner, list[Case]]:
    """A runner, and what it is to be held against. `group`: the ranks that hold the model together."""
    device = group.device if group else device_of(config.device if model is None else str(model.device))
    own = _modules(config, model, device, on_host=group is not None)
    max_len = context_limit(own.config, config.max_context)
    try:
        probe = probe_model(own)
    except UnsupportedError as error:
        raise refusal(own, str(error)) from error
    expected = [] if group and group.rank else expected_logits(own, max_len)
    shards = None
    if group:
        probe, shards = shard_model(own, probe, group)
        own.to(device=device)
    # Parameters that someone else holds stay where they are.
    loaded = LoadedModel(own, probe, device, max_len, model is None or owns_model, shards)
    runner: ModelRunner
    if device.type == "cuda":
        from rill.inference.native.cuda_runner import CudaRunner

        runner = CudaRunner(loaded, config)
    else:
        runner = CpuRunner(loaded, config)
    if config.routed_experts:
        runner.routing = Routing(own)
        runner.routing.is_recording = True
    if reads_pictures(own.config):
        reader = load_pictures(config.model)
        assert reader is not None
        runner.vision = VisionTower(own, reader)
    return runner, expected


def _modules(
    config: NativeEngine.Config, model: PreTrainedModel | None, device: torch.device, *, on_host: bool
) -> PreTrainedModel:
    """`on_host`: to be cut there, where parameters that need no other precision are the mapped file's, then moved."""
    attention = register_paged_attention()
    if model is not None:
        check_interface(type(model), model.config.model_type)
        return twin_of(model, attention)
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = default if config.dtype == "auto" else DTYPES[config.dtype]
    return load_model(config.model, dtype=dtype, device="cpu" if on_host else device, attention=attention)


def context_limit(config: PretrainedConfig, configured: int | None) -> int:
    """Tokens of the longest sequence: the model's own limit, or less."""
    values = config.get_text_config().to_dict()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    own = next((int(values[name]) for name in names if values.get(name)), configured)
    if own is None:
        raise ConfigError(f"{config.model_type!r} does not say how long a sequence may be: set max_context")
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond this, angles depend on the longest sequence of a step: what is in the cache would be turned wrongly.
        own = min(own, int(rope.get("original_max_position_embeddings") or own))
    return min(own, configured or own)


def twin_of(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A second module tree over the same parameters, with another attention: neither disturbs the other."""
    with torch.device("meta"):
        config = copy.deepcopy(model.config)  # the attention's name is kept in it
        twin: PreTrainedModel = type(model)._from_config(
            config, attn_implementation=attention_of_parts(config, attention)
        )
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, module in twin.named_modules():
        prefix = f"{name}." if name else ""
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            table.update({key: state[prefix + key] for key, value in table.items() if value is not None})
    twin.train(False)
    return twin


def device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the native engine runs on cpu and cuda, not on {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device is {name!r}, but torch sees no CUDA device: set device to "cpu" or "auto"')
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
