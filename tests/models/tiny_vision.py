"""Tiny vision-language models with random weights, pictures of noise, and prompts that show them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from rill.models.loading import ModelConfig
from rill.models.pictures import PictureReader
from rill.types import Picture, TokenIds

BEGIN, PLACEHOLDER, END = 104, 105, 106
"""Ids of the character tokenizer's tokens for pictures."""

_TEXT = {
    "vocab_size": 107,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.3,
}
_IDS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 0,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"vision_config": _VISION | {"window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        "text_config": _TEXT | {"head_dim": 8},
        "vision_config": _VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
}


def tiny(model_type: str) -> ModelConfig:
    shape = {"model_type": model_type, "text_config": _TEXT, **_IDS, **SHAPES[model_type]}
    return ModelConfig(shape=shape, tokenizer="chars")


def noise(height: int, width: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def shown(reader: PictureReader, *files: bytes, tail: int = 3) -> tuple[TokenIds, tuple[Picture, ...]]:
    """Letters, a picture, letters, a picture …, letters."""
    ids: list[int] = [5, 20]
    pictures = []
    for number, file in enumerate(files):
        picture = replace(reader.read(file), start=len(ids) + 1)
        ids += [BEGIN, *[PLACEHOLDER] * picture.num_tokens, END, 30 + number]
        pictures.append(picture)
    return np.array([*ids, *range(40, 40 + tail)], np.int32), tuple(pictures)


def plain_logprobs(
    model: Any, reader: PictureReader, ids: TokenIds, pictures: tuple[Picture, ...]
) -> torch.Tensor:
    """[T - 1]: of each token but the first, by transformers' own forward."""
    chosen = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    return plain(model, reader, ids, pictures)[:-1].gather(1, chosen)[:, 0]


def plain(model: Any, reader: PictureReader, ids: TokenIds, pictures: tuple[Picture, ...]) -> torch.Tensor:
    """[T, V]: log-probabilities of what may follow each token."""
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    named: dict[str, torch.Tensor] = {}
    if pictures:
        cut = [reader.patches(picture) for picture in pictures]
        kinds = torch.zeros_like(ids_1T)
        for picture in pictures:
            kinds[:, picture.start : picture.end] = 1
        named = {
            "pixel_values": torch.cat([patches for patches, _ in cut]),
            "image_grid_thw": torch.tensor([grid for _, grid in cut]),
            "mm_token_type_ids": kinds,
        }
    logits: torch.Tensor = model(input_ids=ids_1T, use_cache=False, **named).logits[0]
    return logits.log_softmax(-1)
