"""Export to a Hugging Face folder: safetensors, config and tokenizer that plain transformers loads.

All ranks call it (weights are gathered one at a time); rank 0 writes into a folder beside the target and renames it,
so that a reader never sees half of an export.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rill.models.loading import ModelConfig, load_tokenizer
from rill.models.lora import save_adapter
from rill.training.engine import TrainEngine
from rill.training.module import LM_PREFIX, VALUE_HEAD_FILE, VALUE_HEAD_PREFIX
from rill.training.parallel import full

MAX_SHARD_SIZE = "5GB"


def export_model(engine: TrainEngine, model: ModelConfig, folder: Path) -> Path:
    """Write the merged model; replaces an earlier export at the same place."""
    from huggingface_hub import save_torch_state_dict

    is_writer = engine.world.rank == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in engine.named_weights():
        if is_writer:
            weights[name] = tensor.detach().cpu().contiguous()
    if is_writer:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        head = {
            name.removeprefix(VALUE_HEAD_PREFIX): weights.pop(name)
            for name in list(weights)
            if name.startswith(VALUE_HEAD_PREFIX)
        }
        if head:
            save_file(head, partial / VALUE_HEAD_FILE)
        save_torch_state_dict(weights, partial, max_shard_size=MAX_SHARD_SIZE)
        config = engine.module.lm.config.__class__.from_dict(engine.module.lm.config.to_dict())
        config.dtype = str(engine.compute_dtype).removeprefix("torch.")
        config.architectures = [type(engine.module.lm).__name__]
        config.save_pretrained(partial)
        if engine.module.lm.generation_config is not None:
            engine.module.lm.generation_config.save_pretrained(partial)
        if model.path or model.tokenizer:
            load_tokenizer(model).save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    engine.world.barrier()
    return folder


def export_adapter(engine: TrainEngine, model: ModelConfig, folder: Path) -> Path:
    """Write the LoRA adapter alone, in PEFT's format."""
    lora = engine.config.lora
    assert lora is not None, "this model has no adapter"
    weights = [
        (name.removeprefix(LM_PREFIX), full(p.detach()))
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    ]
    if engine.world.rank == 0:
        save_adapter(weights, lora, folder, base_model=model.path or "")
    engine.world.barrier()
    return folder
