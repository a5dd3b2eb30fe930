"""LoRA adapters served beside the base model: each request picks one, or none.

An adapter is PEFT's state dict: for every adapted Linear, A [rank, in] and B [out, rank], adding scale · B A x to
its output. On CUDA's fast path they are arranged as rill.models.decode.low_rank. Elsewhere, steps in which any
request uses an adapter run through the modules' own forward methods; a hook on each adapted Linear adds every
adapter's part to the rows that asked for it. Other steps are not touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rill.errors import ModelError
from rill.inference.base import ADAPTER_FILES
from rill.models.decode.low_rank import LowRankBank
from rill.models.decode.structure import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "base_model.model."
_ENDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_A.default.weight": "A",
    ".lora_B.default.weight": "B",
}


def read_adapter(folder: str | Path) -> tuple[dict[str, torch.Tensor], float]:
    """State dict and scale (alpha / rank) from PEFT's two files. Where rank_pattern or alpha_pattern give a module a
    scale of its own, its B is multiplied by what that differs."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    description_file, tensors_file = (Path(folder) / name for name in ADAPTER_FILES)
    try:
        description = json.loads(description_file.read_text(encoding="utf-8"))
        rank, alpha = float(description["r"]), float(description["lora_alpha"])
        root = 0.5 if description.get("use_rslora") else 1.0
        scale = alpha / rank**root
        tensors = load_file(tensors_file)
        ranks, alphas = (dict(description.get(f"{name}_pattern") or {}) for name in ("rank", "alpha"))
        for key in [k for k in tensors if ".lora_B." in k and (ranks or alphas)]:
            module = key.removeprefix(_PREFIX).partition(".lora_B.")[0]
            own = float(_matching(alphas, module, alpha)) / float(_matching(ranks, module, rank)) ** root
            if own != scale:
                tensors[key] = (tensors[key].float() * (own / scale)).to(tensors[key].dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{folder} holds no PEFT adapter that can be read: {error}") from error
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{description_file} does not give a rank and lora_alpha: {error!r}") from error
    return tensors, scale


def _matching(pattern: Mapping[str, Any], module: str, default: float) -> Any:
    """PEFT's rule: the first key that the module's name ends with, as whole parts or as a regular expression."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


class AdapterStore:
    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._adapters: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._loads: dict[str, int] = {}
        self._hooked: set[str] = set()
        self.num_changes = 0
        """Counts loads and unloads: whoever has arranged the adapters for itself sees that it must do so again."""
        self._active: list[tuple[torch.Tensor, str]] = []

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def identity(self, name: str | None) -> str:
        """What a cached block depends on: the name, and how often it has been loaded."""
        return "" if name is None else f"{name}#{self._loads[name]}"

    def load(self, name: str, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
        """Add or replace an adapter. Names it does not know and halves without their other half are errors."""
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            end = next((e for e in _ENDS if key.endswith(e)), None)
            module = key.removeprefix(_PREFIX).removesuffix(end or "")
            if end is None or module not in self._modules:
                raise ModelError(
                    f"adapter {name!r} brings {key!r}, which belongs to no linear layer of this model"
                )
            halves.setdefault(module, {})[_ENDS[end]] = tensor
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module, half in halves.items():
            weight = self._modules[module].weight
            if set(half) != {"A", "B"}:
                raise ModelError(f"adapter {name!r} has only {'A' if 'A' in half else 'B'} of {module}")
            down, up = half["A"], half["B"]
            if (
                down.ndim != 2
                or up.ndim != 2
                or down.shape[1] != weight.shape[1]
                or up.shape[0] != weight.shape[0]
                or down.shape[0] != up.shape[1]
            ):
                raise ModelError(
                    f"adapter {name!r}: A {tuple(down.shape)} and B {tuple(up.shape)} do not fit {module} "
                    f"{tuple(weight.shape)}"
                )
            pairs[module] = (down.to(weight), (up.float() * scale).to(weight))
            self._hook(module)
        self._adapters[name] = pairs
        self._loads[name] = self._loads.get(name, 0) + 1
        self.num_changes += 1

    def unload(self, name: str) -> None:
        self._adapters.pop(name, None)
        self.num_changes += 1

    def arranged(self, layers: Sequence[Layer]) -> LowRankBank:
        """All that are loaded, for the fast path over these layers."""
        names: dict[nn.Module, str] = {module: name for name, module in self._modules.items()}
        return LowRankBank(layers, names, self._adapters)

    @contextmanager
    def active(self, rows_by_name: Mapping[str, Any], device: torch.device) -> Iterator[None]:
        """Forward passes inside apply these adapters to these rows of the flat batch."""
        self._active = [(torch.from_numpy(rows).to(device), name) for name, rows in rows_by_name.items()]
        try:
            yield
        finally:
            self._active = []

    def _hook(self, module: str) -> None:
        if module in self._hooked:
            return
        self._hooked.add(module)

        def add(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            for rows, name in self._active:
                pair = self._adapters[name].get(module)
                if pair is not None:
                    part = inputs[0][:, rows] @ pair[0].T @ pair[1].T
                    output = output.index_add(1, rows, part)
            return output

        self._modules[module].register_forward_hook(add)
