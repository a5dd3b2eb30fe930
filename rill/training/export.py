"""Export to a Hugging Face folder: safetensors, config and tokenizer that plain transformers loads.

    folder/            the whole model, adapters merged
        adapter/       the LoRA adapter alone, in PEFT's format, where one was trained

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
from rill.models.pictures import load_pictures
from rill.training.checkpoint import put_in_place
from rill.training.engine import TrainEngine
from rill.training.module import LM_PREFIX, VALUE_HEAD_FILE, VALUE_HEAD_PREFIX
from rill.training.parallel import full

MAX_SHARD_SIZE = "5GB"
ADAPTER_FOLDER = "adapter"


def export_model(engine: TrainEngine, model: ModelConfig, folder: Path) -> Path:
    """Write the model; replaces an earlier export at the same place."""
    from huggingface_hub import save_torch_state_dict

    is_writer = engine.world.rank == 0
    lora = engine.config.lora
    adapter = [] if lora is None else _adapter(engine)
    weights: dict[str, Tensor] = {}
    for name, tensor in engine.named_weights():
        if is_writer:
            weights[name] = alone(tensor.detach().cpu().contiguous())
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
        if lora is not None:
            save_adapter(adapter, lora, partial / ADAPTER_FOLDER, base_model=model.path or "")
        config = engine.module.lm.config.__class__.from_dict(engine.module.lm.config.to_dict())
        config.dtype = str(engine.compute_dtype).removeprefix("torch.")
        config.architectures = [type(engine.module.lm).__name__]
        config.save_pretrained(partial)
        if engine.module.lm.generation_config is not None:
            engine.module.lm.generation_config.save_pretrained(partial)
        if model.path or model.tokenizer:
            load_tokenizer(model).save_pretrained(partial)
        if (reader := load_pictures(model)) is not None:
            reader.processor.save_pretrained(partial)
        put_in_place(partial, folder)
    engine.world.barrier()
    return folder


def alone(tensor: Tensor) -> Tensor:
    """In memory of its own: rows that do not divide over the ranks are gathered into a longer buffer."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _adapter(engine: TrainEngine) -> list[tuple[str, Tensor]]:
    """What was trained, whole, by the names of the model. A collective when sharded."""
    return [
        (name.removeprefix(LM_PREFIX), full(p.detach()))
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    ]
