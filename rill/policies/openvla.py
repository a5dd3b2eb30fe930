"""OpenVLA-OFT with action tokens: one pass that sees in both directions, every number of a chunk a token at its end.

    policy.type = "openvla", policy.path = a folder as OpenVLA's fine-tuning writes it, policy.unnorm_key = "libero_…"

    [<s>, patches of all cameras, prompt, J·A empty places, </s>] ──▶ Llama ──▶ the last 256 tokens' logits

Token b of 256 is id V − 1 − b, the middle of one of 255 equal parts of −1 … 1, which `norm_stats` scale to the robot's
numbers. Parts are named as in the checkpoint; the towers are timm's ViTs, computed here to their last but one layer,
which is what OpenVLA looks at. Refused, with the reason: regressed or diffused actions (they have no
probabilities), a state beside the pictures, and FiLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import affine_grid, gelu, grid_sample, pad, scaled_dot_product_attention

from rill.errors import ConfigError, ModelError
from rill.policies.inputs import Inputs
from rill.policies.pretrained import (
    PretrainedConfig,
    PretrainedPolicy,
    bounds,
    check_pictures,
    check_size,
    read_json,
)
from rill.policies.tokens import TokenConfig, TokenPolicy
from rill.types import RobotSpec

HEADS = 16
"""Of every tower that OpenVLA comes with."""
EMPTY, STOP = 29871, 2
"""Llama's tokens behind a prompt and behind the actions."""
REFUSED = {
    "action_head": "it regresses actions, which have no probabilities: take one that was fine-tuned with action tokens",
    "noisy_action_projector": "it diffuses actions: take one that was fine-tuned with action tokens",
    "proprio_projector": "it reads the state too, which is not computed here: take one of pictures alone",
    "vision_backbone": "its tower is conditioned by FiLM, which is not computed here",
}
"""By what a file beside the weights is named after."""

Shapes = Mapping[str, torch.Size]


class OpenVLAPolicy(PretrainedPolicy, TokenPolicy):
    class Config(PretrainedConfig, TokenConfig):
        type: Literal["openvla"] = "openvla"
        chunk: int = Field(default=8, ge=1)
        """Actions that it was fine-tuned to decide on at once."""
        unnorm_key: str = ""
        """The data set whose norm_stats scale actions. Empty: the only one there is."""
        gripper: bool = False
        """The last number is a gripper from 0 (closed) to 1 (open), as in LIBERO's and BridgeData's checkpoints: the
        simulator is given 1 (closed) or −1."""
        center_crop: bool = False
        """Look at the middle nine tenths, as fine-tuning with image augmentation wants."""
        smoothing: float = Field(default=0.0, ge=0)
        """Spread, in bins, of what imitation is taught. 0: the expert's bin alone."""

    config: Config
    tail = (EMPTY,)

    def __init__(self, config: Config, spec: RobotSpec) -> None:
        nn.Module.__init__(self)
        values, scales = self.layout(config, spec)
        num_tokens = int(values.get("n_action_bins", 256))
        self.build(config, spec, num_tokens, num_tokens - 1)
        self.vla = OpenVLA(values["text_config"], {name: tensor.shape for name, tensor in self.weights()})
        text = self.vla.language_model.config
        self.end = text.vocab_size - values.get("pad_to_multiple_of", 64)
        self.colours = read_json(config.path, "preprocessor_config.json")
        self.begin(scales, text.hidden_size)

    @classmethod
    def layout(cls, config: Config, spec: RobotSpec) -> tuple[dict[str, Any], dict[str, Any]]:
        path, values = config.path, read_json(config.path, "config.json")
        if values.get("model_type") != "openvla":
            raise ModelError(
                f"policy.type = 'openvla' loads OpenVLA, and {path} holds a checkpoint of {values.get('model_type')!r}"
            )
        for name, reason in REFUSED.items():
            if next(Path(path).glob(f"{name}--*.pt"), None):
                raise ModelError(f"{path} cannot be a policy here: {reason} ({name}--….pt)")
        if any(values.get("timm_override_act_layers") or ()) or "clip" in values.get(
            "vision_backbone_id", ""
        ):
            raise ModelError(f"{path}: its tower {values['vision_backbone_id']!r} is not DINOv2 or SigLIP")
        file = Path(path) / "dataset_statistics.json"
        known = (read_json(path, file.name) if file.is_file() else values.get("norm_stats")) or {}
        key = config.unnorm_key or (next(iter(known)) if len(known) == 1 else "")
        if key not in known:
            said = f"policy.unnorm_key = {key!r} is not among" if key else "policy.unnorm_key is one of"
            raise ConfigError(
                f"{said} the norm_stats of {path}: {', '.join(sorted(known)) or 'there are none'}"
            )
        action = known[key]["action"]
        check_size(path, "action_size", len(action["q01"]), spec.action_size)
        scales = {"action": bounds(action["q01"], action["q99"], action.get("mask"))}
        most = len(spec.cameras) if values.get("use_fused_vision_backbone") else 1
        check_pictures(path, spec, values["image_sizes"][0], most)
        return values, scales

    @property
    def tower(self) -> nn.Module:
        tower: nn.Module = self.vla.vision_backbone
        return tower

    def prompt(self, instruction: str) -> str:
        return f"In: What action should the robot take to {instruction.lower()}?\nOut:"

    def look(self, inputs: Inputs) -> Tensor:
        seen = []
        for camera in self.spec.cameras:
            pixels = inputs.images[camera].permute(0, 3, 1, 2).float() / 255.0
            pixels = cropped(pixels) if self.config.center_crop else pixels
            parts = []
            for part, tower in enumerate(self.vla.vision_backbone.children()):
                mean, std = (pixels.new_tensor(self.colours[name][part]) for name in ("means", "stds"))
                coloured = (pixels - mean[:, None, None]) / std[:, None, None]
                parts.append(tower(coloured.to(tower.pos_embed.dtype)))
            seen.append(torch.cat(parts, dim=2))
        return torch.cat(seen, dim=1)

    def denormalised(self, numbers: Tensor) -> Tensor:
        actions = super().denormalised(numbers)
        if self.config.gripper:
            actions = torch.cat([actions[..., :-1], -torch.sign(2.0 * actions[..., -1:] - 1.0)], dim=-1)
        return actions

    def normalised(self, actions: Tensor) -> Tensor:
        if self.config.gripper:
            actions = torch.cat([actions[..., :-1], (1.0 - actions[..., -1:]) / 2.0], dim=-1)
        return super().normalised(actions)

    def encode(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        llm, words_BW = self.vla.language_model, inputs.words_BW
        seen_BLD = self.vla.projector(self.features(inputs))
        ends_BW = torch.cat([words_BW, words_BW.new_full((len(words_BW), 1), STOP)], dim=1)
        words_BWD = llm.get_input_embeddings()(ends_BW.clamp(min=0))
        num_places = self.config.chunk * self.spec.action_size
        places_BLD = words_BWD.new_zeros(len(words_BWD), num_places, words_BWD.shape[2])
        whole_BLD = torch.cat(
            [words_BWD[:, :1], seen_BLD, words_BWD[:, 1:-1], places_BLD, words_BWD[:, -1:]], dim=1
        )
        are_words_BW = (words_BW[:, 1:] >= 0).long()
        there_BL = pad(are_words_BW, (1 + seen_BLD.shape[1], num_places + 1), value=1)
        hidden_BLD = llm.model(
            inputs_embeds=whole_BLD,
            attention_mask=there_BL.bool()[:, None, None].expand(-1, 1, whole_BLD.shape[1], -1),
            position_ids=(there_BL.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state[:, -num_places - 2 : -2]  # each place is told by the one before it
        logits_BLK = llm.lm_head(hidden_BLD)[..., self.end - len(self.centres_K) : self.end].flip(-1)
        shape = (self.config.chunk, self.spec.action_size)
        values_B = self.value(hidden_BLD[:, 0].float()).squeeze(-1)
        return logits_BLK.float().unflatten(1, shape) / self.config.temperature, values_B


class OpenVLA(nn.Module):
    """The parts under their names in a checkpoint; their sizes are those of its weights."""

    def __init__(self, text: dict[str, Any], shapes: Shapes) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        towers = {n: inside(shapes, f"vision_backbone.{n}.") for n in ("featurizer", "fused_featurizer")}
        self.vision_backbone = nn.ModuleDict({name: ViT(part) for name, part in towers.items() if part})
        self.projector = Projector(inside(shapes, "projector."))
        llama = AutoConfig.for_model(**{"model_type": "llama", **text})
        self.language_model = AutoModelForCausalLM.from_config(
            llama, dtype=torch.float32, attn_implementation="sdpa"
        )


class Projector(nn.Module):
    """fc1, fc2, … with GELU between them."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name in sorted(name for name in shapes if name.endswith(".weight")):
            outputs, inputs = shapes[name]
            self.add_module(name.removesuffix(".weight"), nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.children()):
            x = layer(gelu(x) if number else x)
        return x


class ViT(nn.Module):
    """timm's, without its last layer and what follows."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        width, _, size, _ = shapes["patch_embed.proj.weight"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, size, size)})
        self.pos_embed = nn.Parameter(torch.zeros(shapes["pos_embed"]))
        self.cls_token, self.reg_token = (
            nn.Parameter(torch.zeros(shapes[name])) if name in shapes else None
            for name in ("cls_token", "reg_token")
        )
        depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        self.blocks = nn.Sequential(*(Block(inside(shapes, f"blocks.{n}.")) for n in range(depth - 1)))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        prefix = [
            token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None
        ]
        if self.pos_embed.shape[1] == x.shape[1]:
            whole = torch.cat([*prefix, x + self.pos_embed], dim=1)
        else:
            whole = torch.cat([*prefix, x], dim=1) + self.pos_embed
        seen: Tensor = self.blocks(whole)[:, -x.shape[1] :]
        return seen


class Block(nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        width = shapes["norm1.weight"][0]
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = Projector(inside(shapes, "mlp."))
        names = ["scale_factor"] if "ls1.scale_factor" in shapes else []
        self.ls1, self.ls2 = (nn.ParameterDict({n: torch.ones(width) for n in names}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + scaled(self.attn["proj"](attended), self.ls1)
        return x + scaled(self.mlp(self.norm2(x)), self.ls2)


def cropped(pixels: Tensor) -> Tensor:
    """Nine tenths of the area, at the size of the whole, in 256 steps: as OpenVLA crops."""
    part = torch.eye(2, 3, device=pixels.device).expand(len(pixels), 2, 3) * 0.9**0.5
    grid = affine_grid(part, list(pixels.shape), align_corners=True)
    return (grid_sample(pixels, grid, align_corners=True) * 255.5).floor().clamp(0, 255) / 255.0


def scaled(x: Tensor, scale: nn.ParameterDict) -> Tensor:
    return x * scale["scale_factor"] if len(scale) else x


def inside(shapes: Shapes, prefix: str) -> Shapes:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
