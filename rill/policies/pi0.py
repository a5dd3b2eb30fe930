"""π0: a flow policy whose field is a vision-language model with an action expert, as transformers' PI0 computes it.

    policy.type = "pi0", policy.path = a folder as lerobot writes it (config.json, model.safetensors)

    pictures ── tower ── projector ──┐
    instruction ── embedding ────────┴─▶ language model, once ── keys, values ──▶ expert(state, x_t, t), K times ──▶ v

The checkpoint's chunk is longer and wider than the robot's: noise and probabilities are those of the `chunk` actions
that are executed (flow.py). The value is read off the language model's output and the state. Scales of state and action
are the checkpoint's (policy_preprocessor*.safetensors); a base checkpoint has none and takes those of what it imitates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.pi0 import PI0Config, PI0ForConditionalGeneration

from rill.errors import ConfigError, ModelError
from rill.policies.flow import FlowConfig, FlowPolicy
from rill.policies.inputs import Inputs
from rill.policies.pretrained import (
    PretrainedConfig,
    PretrainedPolicy,
    bounds,
    check_pictures,
    check_size,
    read_json,
)
from rill.types import RobotSpec

SHAPE = (
    "vlm_config",
    "dit_config",
    "chunk_size",
    "max_state_dim",
    "max_action_dim",
    "min_period",
    "max_period",
)
"""Values of config.json that transformers' PI0 is built from; the others of its layout are lerobot's."""
NAMES = {
    "paligemma_with_expert.paligemma.model.vision_tower.vision_model.": "model.vlm.vision_tower.",
    "paligemma_with_expert.paligemma.model.": "model.vlm.",
    "paligemma_with_expert.paligemma.lm_head.": "model.vlm.language_model.embed_tokens.",
    "paligemma_with_expert.gemma_expert.model.": "model.dit.",
    "state_proj.": "embed_action_time.state_proj.",
    "action_in_proj.": "embed_action_time.action_in_proj.",
    "action_time_mlp_": "embed_action_time.action_time_mlp_",
}
"""Beginnings of names in a checkpoint, and in transformers' PI0."""
BEHIND_MODEL = tuple(f"model.{name}" for name in (*NAMES, "action_out_proj."))
"""As lerobot's own fine-tuning writes them."""


class Encoded(NamedTuple):
    """What the expert attends to. `cache` is cut back to `length` after every step."""

    cache: Any
    length: int
    mask_BL: Tensor
    state_BS: Tensor
    mean_BD: Tensor
    """Of the language model's output."""


class PI0Policy(PretrainedPolicy, FlowPolicy):
    class Config(PretrainedConfig, FlowConfig):
        type: Literal["pi0"] = "pi0"
        chunk: int = Field(default=10, ge=1)
        """Actions of the checkpoint's chunk that are executed."""
        num_steps: int = Field(default=10, ge=2)
        """K: evaluations of the field for a chunk."""

    config: Config

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        nn.Module.__init__(self)
        shape, scales = self.layout(config, spec)
        self.build(config, spec, (shape.chunk_size, shape.max_action_dim))
        self.vla = PI0ForConditionalGeneration(shape)
        self.vla.model.dit.embed_tokens = None  # the expert reads no words
        self.begin(scales, shape.vlm_config.text_config.hidden_size + spec.state_size)

    @classmethod
    def layout(cls, config: Config, spec: RobotSpec) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
        path, values = config.path, read_json(config.path, "config.json")
        kind = values.get("type", values.get("model_type"))
        if kind != "pi0":
            raise ModelError(f"policy.type = 'pi0' loads π0, and {path} holds a checkpoint of {kind!r}")
        shape = PI0Config(**{name: values[name] for name in SHAPE if name in values})
        features = {**(values.get("input_features") or {}), **(values.get("output_features") or {})}
        for what, name, most in (
            ("state_size", "observation.state", shape.max_state_dim),
            ("action_size", "action", shape.max_action_dim),
        ):
            made_for, actual = features.get(name, {"shape": [most]})["shape"][0], getattr(spec, what)
            if made_for != most or actual > most:  # a base checkpoint is made for all that fit
                check_size(path, what, made_for, actual)
        cameras = [name for name, feature in features.items() if feature.get("type") == "VISUAL"]
        size = shape.vlm_config.vision_config.image_size
        check_pictures(path, spec, size, len(cameras) or len(spec.cameras))
        if config.chunk > shape.chunk_size:
            raise ConfigError(
                f"policy.chunk = {config.chunk}, and the checkpoint in {path} decides on {shape.chunk_size} actions"
            )
        return shape, scales_of(Path(path), values.get("normalization_mapping") or {}, spec)

    @property
    def tower(self) -> nn.Module:
        tower: nn.Module = self.vla.model.vlm.vision_tower
        return tower

    def renamed(self, name: str) -> str:
        name = name.removeprefix("model.") if name.startswith(BEHIND_MODEL) else name
        found = next((old for old in NAMES if name.startswith(old)), "")
        return NAMES.get(found, "") + name.removeprefix(found)

    def prompt(self, instruction: str) -> str:
        return f"{instruction.strip()}\n"

    def look(self, inputs: Inputs) -> Tensor:
        pictures = [inputs.images[camera].permute(0, 3, 1, 2) for camera in self.spec.cameras]
        pixels = torch.stack(pictures, dim=1).flatten(0, 1).to(self.vla.dtype) / 127.5 - 1.0
        seen: Tensor = self.tower(pixels).last_hidden_state
        return seen.reshape(-1, len(pictures) * seen.shape[1], seen.shape[2])

    def encode(self, inputs: Inputs) -> Encoded:
        vlm, words_BW = self.vla.model.vlm, inputs.words_BW
        seen = vlm.multi_modal_projector(self.features(inputs))
        prefix_BLD = torch.cat([seen, vlm.get_input_embeddings()(words_BW.clamp(min=0))], dim=1)
        mask_BL = torch.cat([words_BW.new_ones(seen.shape[:2]), (words_BW >= 0).long()], dim=1)
        out = vlm(
            inputs_embeds=prefix_BLD,
            attention_mask=mask_BL,
            position_ids=mask_BL.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(mask_BL),
            use_cache=True,
        )
        hidden_BLD = out.last_hidden_state.float() * mask_BL[..., None]
        state_BS = self._scaled(inputs.states_BS, "state")
        return Encoded(
            cache=out.past_key_values,
            length=mask_BL.shape[1],
            mask_BL=mask_BL,
            state_BS=state_BS,
            mean_BD=hidden_BLD.sum(1) / mask_BL.sum(1, keepdim=True),
        )

    def velocity(self, encoded: Encoded, x_BJA: Tensor, time_B: Tensor) -> Tensor:
        state_BS, kind = encoded.state_BS, self.vla.dtype
        out = self.vla(
            state=pad(state_BS, (0, self.vla.config.max_state_dim - state_BS.shape[1])).to(kind),
            noise=x_BJA.to(kind),
            timestep=time_B,
            attention_mask=encoded.mask_BL,
            past_key_values=encoded.cache,
        )
        encoded.cache.crop(encoded.length)
        field: Tensor = out.logits.float()
        return field

    def value_of(self, encoded: Encoded) -> Tensor:
        found: Tensor = self.value(torch.cat([encoded.mean_BD, encoded.state_BS], dim=1)).squeeze(-1)
        return found


def scales_of(folder: Path, kinds: dict[str, str], spec: RobotSpec) -> dict[str, tuple[Tensor, Tensor]]:
    """Of "state" and "action", as lerobot's processor keeps them; nothing where it keeps none."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("policy_preprocessor*normalizer*.safetensors")):
        found |= load_file(file)
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    for what, name, size in (
        ("state", "observation.state", spec.state_size),
        ("action", "action", spec.action_size),
    ):
        kind = kinds.get(what.upper(), "MEAN_STD")
        low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}.get(kind, ("mean", "std"))
        if f"{name}.{low}" not in found or kind == "IDENTITY":
            continue
        first, second = found[f"{name}.{low}"].double(), found[f"{name}.{high}"].double()
        check_size(str(folder), f"{what}_size", len(first), size)
        scales[what] = (first, second + 1e-8) if low == "mean" else bounds(first.tolist(), second.tolist())
    return scales
