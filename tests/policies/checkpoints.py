"""Tiny checkpoints in the layouts of π0 (lerobot's) and OpenVLA-OFT, with the names of real ones, and the modules of
transformers that they are made of: what a policy loaded from them must compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.pi0 import PI0Config, PI0ForConditionalGeneration

from rill.types import Observation, RobotSpec

SPEC = RobotSpec(state_size=3, action_size=2, cameras=("front", "wrist"), image_size=16)
SCALES = {
    "observation.state.mean": torch.tensor([0.1, -0.2, 0.3]),
    "observation.state.std": torch.tensor([0.5, 1.0, 2.0]),
    "action.mean": torch.tensor([0.05, -0.1]),
    "action.std": torch.tensor([0.2, 0.1]),
}
LLAMA = {
    "vocab_size": 32064,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
COLOURS = {
    "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
    "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
}
STATS = {"action": {"q01": [-0.5, 0.0], "q99": [0.5, 1.0], "mask": [True, False]}}


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    said = (
        "go",
        "left",
        "right",
        "In",
        "What",
        "action",
        "should",
        "the",
        "robot",
        "take",
        "to",
        "Out",
        ":",
        "?",
    )
    words = ("<pad>", "<bos>", "<unk>", *said)
    tokens = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )
    made.save_pretrained(folder)
    return made


def seen(count: int, spec: RobotSpec = SPEC) -> list[Observation]:
    rng = np.random.default_rng(0)
    shape = (spec.image_size, spec.image_size, 3)
    return [
        Observation(
            state=rng.standard_normal(spec.state_size).astype(np.float32),
            images={name: rng.integers(0, 256, shape, np.uint8) for name in spec.cameras},
            instruction="go left" if n % 2 else "go to the right",
        )
        for n in range(count)
    ]


def shaken(model: torch.nn.Module) -> None:
    """Biases and norms that are not 0 and 1: a name that is mixed up changes what is computed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


# --- π0 -----------------------------------------------------------------------------------------------------


def pi0(folder: Path, *, prefix: str = "", **changes: Any) -> PI0ForConditionalGeneration:
    """`prefix`: "model." stands before the names that lerobot's own fine-tuning writes."""
    torch.manual_seed(0)
    gemma = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    parts: dict[str, Any] = {
        "vlm_config": {
            "model_type": "paligemma",
            "text_config": {
                "model_type": "gemma",
                "hidden_size": 32,
                "intermediate_size": 64,
                "vocab_size": 128,
                **gemma,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
                "vision_use_head": False,
                "projection_dim": 32,
            },
            "projection_dim": 32,
            "image_token_id": 127,
        },
        "dit_config": {
            "model_type": "gemma",
            "hidden_size": 24,
            "intermediate_size": 48,
            "vocab_size": 128,
            **gemma,
        },
    }
    sizes = {"chunk_size": 6, "max_state_dim": 8, "max_action_dim": 5}
    model = PI0ForConditionalGeneration(PI0Config(**parts, **sizes)).eval()
    shaken(model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {prefix + _lerobot_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    save_file(SCALES, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    picture = {"type": "VISUAL", "shape": [3, 16, 16]}
    config = {
        "type": "pi0",
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [3]},
            "observation.images.front": picture,
            "observation.images.wrist": picture,
        },
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "tokenizer_max_length": 48,
        **parts,
        **sizes,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model


def _lerobot_name(name: str) -> str:
    name = name.removeprefix("embed_action_time.")
    name = name.replace(
        "model.vlm.language_model.embed_tokens", "paligemma_with_expert.paligemma.lm_head"
    ).replace("model.dit.embed_tokens", "paligemma_with_expert.gemma_expert.lm_head")
    name = name.replace("model.vlm.vision_tower.", "model.vlm.vision_tower.vision_model.")
    name = name.replace("model.vlm.", "paligemma_with_expert.paligemma.model.")
    return name.replace("model.dit.", "paligemma_with_expert.gemma_expert.model.")


def pi0_actions(
    model: PI0ForConditionalGeneration, words: Any, observations: list[Observation], noise: torch.Tensor
) -> torch.Tensor:
    """As transformers samples them, in the robot's numbers: [B, chunk, A]."""
    states = torch.stack([torch.from_numpy(o.state) for o in observations])
    states = (states - SCALES["observation.state.mean"]) / SCALES["observation.state.std"]
    pixels = torch.stack(
        [
            torch.stack([torch.from_numpy(o.images[c]).permute(2, 0, 1) / 127.5 - 1.0 for c in SPEC.cameras])
            for o in observations
        ]
    )
    ids = [[1, *words.encode(f"{o.instruction}\n", add_special_tokens=False)] for o in observations]
    longest = max(map(len, ids)) + 1
    padded = torch.tensor([[127] * 8 + row + [0] * (longest - len(row)) for row in ids])
    drawn = model.sample_actions(
        state=torch.nn.functional.pad(states, (0, 5)),
        input_ids=padded,
        pixel_values=pixels,
        noise=noise,
        attention_mask=(padded != 0).long(),
        pixel_attention_mask=torch.ones(len(ids), 2, dtype=torch.bool),
        num_steps=4,
    )
    return drawn[..., :2] * SCALES["action.std"] + SCALES["action.mean"]


# --- OpenVLA-OFT --------------------------------------------------------------------------------------------


class Source(torch.nn.Module):
    """OpenVLA-OFT out of transformers' own modules, one observation at a time and without padding."""

    def __init__(self) -> None:
        super().__init__()
        vit = {"hidden_size": 32, "num_attention_heads": 16, "image_size": 16, "patch_size": 8}
        eps = {"layer_norm_eps": 1e-6, "hidden_act": "gelu", "num_hidden_layers": 3}
        self.dino = Dinov2WithRegistersModel(
            Dinov2WithRegistersConfig(**vit, **eps, num_register_tokens=4, mlp_ratio=2)
        )
        self.siglip = SiglipVisionModel(SiglipVisionConfig(**vit, **eps, intermediate_size=48))
        self.projector = torch.nn.ModuleList(
            [torch.nn.Linear(64, 96), torch.nn.Linear(96, 16), torch.nn.Linear(16, 16)]
        )
        self.llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
        self.eval()
        shaken(self)

    @torch.no_grad()
    def logits(self, observation: Observation, words: Any, chunk: int) -> torch.Tensor:
        """[J, A, 256], of the tokens 31999, 31998, …"""
        seen = []
        for camera in SPEC.cameras:
            pixels = torch.from_numpy(observation.images[camera]).permute(2, 0, 1)[None] / 255.0
            means, stds = (torch.tensor(COLOURS[name])[:, None, :, None, None] for name in ("means", "stds"))
            dino = self.dino((pixels - means[0]) / stds[0], output_hidden_states=True).hidden_states[-2]
            siglip = self.siglip((pixels - means[1]) / stds[1], output_hidden_states=True).hidden_states[-2]
            seen.append(torch.cat([dino[:, 5:], siglip], dim=2))
        first, second, third = self.projector
        act = torch.nn.functional.gelu
        patches = third(act(second(act(first(torch.cat(seen, dim=1))))))
        said = f"In: What action should the robot take to {observation.instruction}?\nOut:"
        ids = torch.tensor([[1, *words.encode(said, add_special_tokens=False), 29871]])
        embedded = self.llama.get_input_embeddings()
        places = torch.zeros(1, chunk * 2, 16)
        stop = embedded(torch.tensor([[2]]))
        whole = torch.cat([embedded(ids[:, :1]), patches, embedded(ids[:, 1:]), places, stop], dim=1)
        length = whole.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool)
        logits = self.llama(inputs_embeds=whole, attention_mask=mask).logits[0]
        begin = patches.shape[1] + ids.shape[1] - 1
        return logits[begin : begin + chunk * 2, 31744:32000].flip(-1).view(chunk, 2, 256)

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of a checkpoint: timm's for the towers."""
        written = {f"language_model.{name}": t for name, t in self.llama.state_dict().items()}
        for n, layer in enumerate(self.projector):
            written |= {f"projector.fc{n + 1}.{name}": t for name, t in layer.state_dict().items()}
        dino, siglip = self.dino.state_dict(), self.siglip.state_dict()
        first, second = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
        places = dino["embeddings.position_embeddings"]
        written |= {
            f"{first}cls_token": dino["embeddings.cls_token"] + places[:, :1],
            f"{first}reg_token": dino["embeddings.register_tokens"],
            f"{first}pos_embed": places[:, 1:],
            f"{first}norm.weight": dino["layernorm.weight"],
            f"{second}pos_embed": siglip["embeddings.position_embedding.weight"][None],
            f"{second}attn_pool.latent": torch.zeros(1, 1, 32),
        }
        for kind in ("weight", "bias"):
            written[f"{first}patch_embed.proj.{kind}"] = dino[
                f"embeddings.patch_embeddings.projection.{kind}"
            ]
            written[f"{second}patch_embed.proj.{kind}"] = siglip[f"embeddings.patch_embedding.{kind}"]
        for n in range(3):
            written |= _dino_block(_under(dino, f"layer.{n}."), f"{first}blocks.{n}.")
            written |= _siglip_block(_under(siglip, f"encoder.layers.{n}."), f"{second}blocks.{n}.")
        return {name: tensor.detach().clone().contiguous() for name, tensor in written.items()}


def _under(weights: dict[str, torch.Tensor], ending: str) -> dict[str, torch.Tensor]:
    """What follows `ending`, whatever stands before it."""
    return {name.split(ending, 1)[1]: t for name, t in weights.items() if ending in name}


def _dino_block(w: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    block = {f"ls{n}.scale_factor": w[f"layer_scale{n}.lambda1"] for n in (1, 2)}
    for kind in ("weight", "bias"):
        parts = [w[f"attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
        block[f"attn.qkv.{kind}"] = torch.cat(parts)
        block[f"attn.proj.{kind}"] = w[f"attention.output.dense.{kind}"]
        block |= {f"{name}.{kind}": w[f"{name}.{kind}"] for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}
    return {prefix + name: tensor for name, tensor in block.items()}


def _siglip_block(w: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    block = {}
    for kind in ("weight", "bias"):
        parts = [w[f"self_attn.{part}_proj.{kind}"] for part in ("q", "k", "v")]
        block[f"attn.qkv.{kind}"] = torch.cat(parts)
        block[f"attn.proj.{kind}"] = w[f"self_attn.out_proj.{kind}"]
        block |= {f"norm{n}.{kind}": w[f"layer_norm{n}.{kind}"] for n in (1, 2)}
        block |= {f"mlp.fc{n}.{kind}": w[f"mlp.fc{n}.{kind}"] for n in (1, 2)}
    return {prefix + name: tensor for name, tensor in block.items()}


def openvla(folder: Path, **changes: Any) -> Source:
    torch.manual_seed(0)
    source = Source()
    folder.mkdir(parents=True, exist_ok=True)
    weights = source.weights()
    names = sorted(weights)
    half = len(names) // 2
    for n, part in enumerate((names[:half], names[half:])):
        save_file({name: weights[name] for name in part}, folder / f"model-0000{n + 1}-of-00002.safetensors")
    index = {"weight_map": {name: "" for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "openvla",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "timm_override_act_layers": [None, None],
        "use_fused_vision_backbone": True,
        "image_sizes": [16, 16],
        "text_config": {"model_type": "llama", **LLAMA},
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
        "norm_stats": {"bridge_orig": STATS},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(COLOURS))
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero": STATS, "bridge": STATS}))
    return source
