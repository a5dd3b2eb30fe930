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
from rill.models.decode.low_rank import AdapterTensors, LowRankBank
from rill.models.decode.structure import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")


def read_adapter(folder: str | Path) -> AdapterTensors:
    """From PEFT's two files. The scale is alpha / rank; rank_pattern and alpha_pattern may give a module its own."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    description_file, tensors_file = (Path(folder) / name for name in ADAPTER_FILES)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    try:
        description = json.loads(description_file.read_text(encoding="utf-8"))
        rank, alpha = float(description["r"]), float(description["lora_alpha"])
        ranks, alphas = (dict(description.get(f"{name}_pattern") or {}) for name in ("rank", "alpha"))
        root = 0.5 if description.get("use_rslora") else 1.0
        for key, tensor in load_file(tensors_file).items():
            if (parts := _KEY.fullmatch(key)) is None:
                raise ModelError(f"{tensors_file} holds {key!r}, which is no half of a low-rank product")
            module, half = parts.groups()
            its_rank = _matching(ranks, module, rank)
            if half == "A" and tensor.shape[:1] != (its_rank,):
                raise ModelError(
                    f"{tensors_file}: {module} has A {tuple(tensor.shape)}, but {description_file.name} says that its "
                    f"rank is {its_rank:g}"
                )
            if half == "B":
                scale = _matching(alphas, module, alpha) / its_rank**root
                tensor = tensor.float() * scale
            halves.setdefault(module, {})[half] = tensor
    except (OSError, ValueError, SafetensorError, re.error) as error:
        raise ModelError(f"{folder} holds no PEFT adapter that can be read: {error}") from error
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{description_file} does not give a rank and lora_alpha: {error!r}") from error
    for module, found in halves.items():
        if len(found) == 1:
            raise ModelError(f"{tensors_file} has only {next(iter(found))} of {module}")
    return {module: (found["A"], found["B"]) for module, found in halves.items()}


def _matching(pattern: Mapping[str, Any], module: str, default: float) -> float:
    """PEFT's rule: the first key that the module's name ends with, as whole parts or as a regular expression."""
    found = (float(value) for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


class AdapterStore:
    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._adapters: dict[str, AdapterTensors] = {}
        self._loaded_at: dict[str, int] = {}
        self._hooked: set[str] = set()
        self.names: frozenset[str] = frozenset()
        """Of those that are loaded. Any thread may look."""
        self.num_changes = 0
        """Counts loads and unloads: whoever has arranged the adapters for itself sees that it must do so again."""
        self._active: list[tuple[torch.Tensor, str]] = []

    def identity(self, name: str | None) -> str:
        """What a cached block depends on: the name, and when it was loaded."""
        return "" if name is None else f"{name}#{self._loaded_at[name]}"

    def load(self, name: str, tensors: AdapterTensors) -> None:
        """Add or replace an adapter. A module that the model does not have, or has in another shape, is an error."""
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module, (down, up) in tensors.items():
            if module not in self._modules:
                raise ModelError(
                    f"adapter {name!r} brings {module!r}, which belongs to no linear layer of this model"
                )
            weight = self._modules[module].weight
            found = (*down.shape[1:], *up.shape[:1], *up.shape[1:])
            if found != (weight.shape[1], weight.shape[0], down.shape[0]):
                raise ModelError(
                    f"adapter {name!r}: A {tuple(down.shape)} and B {tuple(up.shape)} do not fit {module} "
                    f"{tuple(weight.shape)}"
                )
            pairs[module] = (down.to(weight), up.to(weight))
            self._hook(module)
        self._adapters[name] = pairs
        self._loaded_at[name] = self.num_changes
        self._note_change()

    def unload(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._note_change()

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

    def _note_change(self) -> None:
        self.names = frozenset(self._adapters)
        self.num_changes += 1

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
