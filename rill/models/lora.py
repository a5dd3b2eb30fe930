"""Low-rank adapters: W x + (alpha / rank) · B A x, with W frozen.

rill's own small implementation, so that no extra library stands in the training path; what it exports is PEFT's
format (adapter_config.json and adapter_model.safetensors), which PEFT, vLLM and SGLang load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rill.config import Config
from rill.errors import ConfigError

TOWERS = {"visual", "vision_tower", "vision_backbone"}
"""What models call the part that looks."""
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_A, _B = ".lora_A.weight", ".lora_B.weight"


class LoRAConfig(Config):
    """Size and place of the adapters."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = DEFAULT_TARGETS
    """Last parts of the names of the linear layers to adapt."""
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoRALinear(nn.Module):
    """A linear layer with an adapter. B starts at zero: the model is unchanged until the first step."""

    def __init__(self, base: nn.Linear, config: LoRAConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = config.scale
        factory: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False, **factory)
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False, **factory)
        bound = 1.0 / math.sqrt(base.in_features)
        with torch.no_grad():
            drawn = torch.empty(config.rank, base.in_features).uniform_(-bound, bound, generator=generator)
            self.lora_A.weight.copy_(drawn)
            self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.lora_B(self.lora_A(x))
        return out


def add_lora(model: nn.Module, config: LoRAConfig) -> None:
    """Freeze the model and put adapters on every target; a vision tower, which may have layers of the same names, is
    left as it is."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(config.seed)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.rpartition(".")[2] in config.targets
        and not TOWERS & set(name.split("."))
    ]
    if not found:
        names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(f"lora.targets {list(config.targets)} match no layer; this model has {names}")
    for name, module in found:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], LoRALinear(module, config, generator))


def merged_weights(weights: Iterable[tuple[str, Tensor]], config: LoRAConfig) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and W + scale · B A. A layer's base, A and B follow one another in `weights`."""
    base: tuple[str, Tensor] | None = None
    down: Tensor | None = None
    for name, tensor in weights:
        if name.endswith(".base.weight"):
            if base is not None:
                yield base
            base = (name.replace(".base.weight", ".weight"), tensor)
        elif name.endswith(_A):
            down = tensor
        elif name.endswith(_B):
            assert base is not None and down is not None
            delta = (tensor.float() @ down.float()) * config.scale
            yield base[0], (base[1].float() + delta).to(base[1].dtype)
            base = None
        else:
            yield name.replace(".base.bias", ".bias"), tensor


def save_adapter(
    weights: Iterable[tuple[str, Tensor]], config: LoRAConfig, folder: Path, base_model: str
) -> None:
    """Write the adapters alone, as PEFT lays them out."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}": tensor.contiguous().cpu()
        for name, tensor in weights
        if name.endswith((_A, _B))
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(config.targets),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n")
