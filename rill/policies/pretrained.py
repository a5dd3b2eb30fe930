"""Pretrained vision-language-action models as policies: what π0 (pi0.py) and OpenVLA-OFT (openvla.py) have in common.

A checkpoint's folder is read in its own layout, and `save` writes that layout again: the same names, the same small
files, adapters merged, rill's own weights (the value head) beside them. Whether it fits the robot is told from the
small files (`layout`), before any process starts. A vision tower that is frozen looks once at each observation in the
rollout and once in the trainer, for all passes over a batch: its features are larger than the pictures, so they do not
travel.
"""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from rill.config import PartConfig
from rill.errors import ConfigError, ModelError
from rill.models.loading import DTYPES, ModelConfig, load_tokenizer
from rill.models.lora import LoRAConfig, add_lora, merged_weights
from rill.policies.base import Policy, PolicyConfig
from rill.policies.inputs import FEATURES, Inputs, read
from rill.policies.trunk import linear, mean_and_spread
from rill.types import Observation, RobotSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VALUE_WIDTH = 256


class PretrainedConfig(PolicyConfig):
    """What every pretrained policy has."""

    path: str
    """The checkpoint's folder."""
    tokenizer: str = ""
    """A folder with the tokenizer, where the checkpoint's has none."""
    max_words: int = Field(default=48, ge=1)
    """Tokens of an instruction, with what stands around it."""
    freeze_vision: bool = False
    """Train everything but the vision tower, whose features are then computed once."""
    lora: LoRAConfig | None = None
    """Train adapters and the value head alone; the vision tower is frozen with the rest."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    def inside(self, folder: Path) -> Self:
        return self.model_copy(update={"path": str(folder), "tokenizer": ""})

    def words(self) -> PreTrainedTokenizerBase:
        try:
            return load_tokenizer(ModelConfig(path=self.path, tokenizer=self.tokenizer or None))
        except ModelError as error:
            raise ModelError(f"{error} (here: `policy.tokenizer`)") from error

    def files(self) -> list[Path]:
        """Of the weights."""
        found = sorted(Path(self.path).glob("model*.safetensors"))
        if not found:
            raise ModelError(f"{self.path} holds no model*.safetensors: give a whole checkpoint's folder")
        return found


class PretrainedPolicy(Policy):
    """`vla` is the model, under the names of its checkpoint or close to them."""

    config: PretrainedConfig
    vla: Any
    action_shift: Tensor
    action_scale: Tensor
    tail: tuple[int, ...] = ()
    """Tokens behind an instruction."""

    # --- what a model says of itself ----------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def layout(cls, config: Any, spec: RobotSpec) -> Any:
        """What the folder's small files say. UserError: it holds something else, or another robot's."""

    @property
    @abstractmethod
    def tower(self) -> nn.Module:
        """What looks at pictures."""

    @abstractmethod
    def look(self, inputs: Inputs) -> Tensor:
        """[B, patches of all cameras, width]."""

    @abstractmethod
    def prompt(self, instruction: str) -> str: ...

    def renamed(self, name: str) -> str:
        """A weight's name in `vla`."""
        return name

    # --- a policy of it -----------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: PartConfig, spec: RobotSpec) -> None:
        assert isinstance(config, PretrainedConfig)
        cls.layout(config, spec)
        config.words()
        config.files()

    def begin(self, scales: Mapping[str, tuple[Tensor, Tensor]], value_inputs: int) -> None:
        """Once `vla` is made: its scales (of "state" and "action"), weights and what of it is trained."""
        spec, lora = self.spec, self.config.lora
        for what, size in (("state", spec.state_size), ("action", spec.action_size)):
            shift, scale = scales.get(what, (torch.zeros(size), torch.ones(size)))
            self.register_buffer(f"{what}_shift", shift.float())
            self.register_buffer(f"{what}_scale", scale.float())
        self.has_scales = "action" in scales
        self.value: nn.Module = nn.Sequential(
            linear(value_inputs, VALUE_WIDTH, 2**0.5), nn.Tanh(), linear(VALUE_WIDTH, 1, 1.0)
        )
        self._take_weights()
        for parameter in self.vla.parameters():
            parameter.data = parameter.data.to(DTYPES[self.config.dtype])
        if lora is not None:
            add_lora(self.vla, lora)
        self.has_frozen_tower = self.config.freeze_vision or lora is not None
        if self.has_frozen_tower:
            self.tower.requires_grad_(False)
        self.vla.eval()
        self._tokenizer = self.config.words()
        self._known: dict[str, npt.NDArray[np.int64]] = {}

    def seen(self, observations: Sequence[Observation]) -> Inputs:
        inputs = read(observations, self.spec, self._words)
        if not self.has_frozen_tower:
            return inputs
        with torch.no_grad():
            blocks = [self.look(block.to(self.device)).cpu() for block in inputs.blocks(self.config.rows)]
        features = torch.cat(blocks)
        return replace(inputs, images={FEATURES: features[: len(inputs)]})

    def features(self, inputs: Inputs) -> Tensor:
        return inputs.images[FEATURES] if FEATURES in inputs.images else self.look(inputs)

    def set_normaliser(self, states_NS: Tensor, actions_NA: Tensor) -> None:
        """A checkpoint that brings its own keeps it."""
        if self.has_scales:
            return
        for what, rows in (("state", states_NS), ("action", actions_NA)):
            mean, spread = mean_and_spread(rows)
            getattr(self, f"{what}_shift").copy_(mean)
            getattr(self, f"{what}_scale").copy_(spread)

    def normalised(self, actions: Tensor) -> Tensor:
        return self._scaled(actions, "action")

    def denormalised(self, numbers: Tensor) -> Tensor:
        return numbers * self.action_scale + self.action_shift

    def _scaled(self, numbers: Tensor, what: str) -> Tensor:
        scaled: Tensor = (numbers - getattr(self, f"{what}_shift")) / getattr(self, f"{what}_scale")
        return scaled

    def _words(self, instruction: str) -> npt.NDArray[np.int64]:
        if instruction not in self._known:
            written = self._tokenizer.encode(self.prompt(instruction), add_special_tokens=False)
            ids = [self._tokenizer.bos_token_id, *written, *self.tail]
            missing = self.config.max_words - len(ids)
            if missing < 0:
                raise ConfigError(
                    f"the instruction {instruction!r} has {len(ids)} tokens: raise policy.max_words, which is "
                    f"{self.config.max_words}"
                )
            # Always as long, −1 where there is nothing; one −1 at least: a mask of ones may take another path.
            self._known[instruction] = np.array([*ids[:1], *[-1] * (missing + 1), *ids[1:]], np.int64)
        return self._known[instruction]

    # --- files --------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for source in (Path(self.config.tokenizer or self.config.path), Path(self.config.path)):
            for file in source.iterdir():
                is_small = file.suffix in (".json", ".model") or "normalizer" in file.name
                if is_small and not file.name.startswith("model.safe"):
                    shutil.copy(file, folder)
        super().save(folder)

    def stored(self) -> dict[str, Tensor]:
        """The checkpoint's weights with ours in the place of those that were read, and rill's own."""
        lora = self.config.lora
        own = dict(merged_weights(self.state_dict().items(), lora) if lora else self.state_dict())
        written = dict(self.weights())
        written |= {name: own[ours].detach().clone() for name, ours in self._names.items()}
        return written | {name: tensor for name, tensor in own.items() if not name.startswith("vla.")}

    def load(self, folder: Path) -> None:
        """It was opened from there."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Of the checkpoint."""
        for file in self.config.files():
            yield from load_file(file).items()

    def _take_weights(self) -> None:
        """`_names`: what the file's names are here."""
        own, self._names = self.state_dict(), {}
        with torch.no_grad():
            for name, tensor in self.weights():
                ours = name if name in own else f"vla.{self.renamed(name)}"
                if ours not in own:
                    continue  # of what is not computed here, such as a last layer that nobody asks
                if own[ours].shape != tensor.shape:
                    raise ModelError(
                        f"{self.config.path}: {name} has the shape {tuple(tensor.shape)}, and its config.json says "
                        f"{tuple(own[ours].shape)}"
                    )
                own[ours].copy_(tensor)
                if ours != name:
                    self._names[name] = ours
        missing = [name for name in own if name.startswith("vla.") and name not in self._names.values()]
        if missing:
            raise ModelError(
                f"{self.config.path} lacks {len(missing)} weights of a {self.config.type!r} policy, the first "
                f"{missing[0].removeprefix('vla.')!r}"
            )


def read_json(folder: str, name: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"policy.path = {folder!r} is no checkpoint of a policy: {name} cannot be read ({error})"
        ) from error
    return values


def check_size(folder: str, what: str, made_for: int, actual: int) -> None:
    if made_for != actual:
        raise ConfigError(
            f"the checkpoint in {folder} is another robot's: its {what} is {made_for}, the simulator's {actual}"
        )


def check_pictures(folder: str, spec: RobotSpec, size: int, most: int) -> None:
    if not spec.cameras or spec.image_size != size:
        raise ConfigError(
            f"the checkpoint in {folder} looks at pictures of {size} pixels: set simulator.image_size = {size}"
        )
    if len(spec.cameras) > most:
        raise ConfigError(
            f"the checkpoint in {folder} looks through {most} cameras, the simulator has {', '.join(spec.cameras)}"
        )


def bounds(low: Any, high: Any, mask: Any = None) -> tuple[Tensor, Tensor]:
    """(shift, scale) between low … high and −1 … 1; numbers that the mask leaves out are as they are."""
    low_A, high_A = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
    half_A = (high_A - low_A + 1e-8) / 2.0
    is_scaled_A = torch.ones_like(low_A, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return torch.where(is_scaled_A, low_A + half_A, 0.0), torch.where(is_scaled_A, half_A, 1.0)
