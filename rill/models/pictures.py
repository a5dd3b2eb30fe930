"""From a picture's file to what a vision-language model computes on: placeholders, patches and positions.

    file ── read ──▶ Picture: how many placeholders        whoever writes prompts: rill.data.chat, the server
    Picture ── patches ──▶ rows of numbers                 whoever runs the tower: rill.models.vision

Both go through the model's own image processor (of the Qwen-VL family), so a picture has the same patches in the engine
and in the trainer.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rill.errors import DataError
from rill.models.loading import ModelConfig, load_model_config, model_folder, reads_pictures
from rill.models.pillow import pillow
from rill.types import Picture, TokenIds

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_KEPT_BYTES = 256 * 2**20
"""Of patches that are remembered: the samples of a group show the same picture."""
MIN_TOKENS = 4
"""Of a picture for a fresh model, which brings no processor of its own."""

Positions = npt.NDArray[np.int64]


class PictureReader:
    """A model's image processor."""

    def __init__(self, model_config: PretrainedConfig, folder: Path | None) -> None:
        """`folder`: where the processor's settings lie; None: a fresh model's, from its shape."""
        self.token_id = int(model_config.image_token_id)
        self._vision: Any = model_config.vision_config
        self._folder = folder
        self._patches: OrderedDict[str, tuple[Tensor, tuple[int, int, int]]] = OrderedDict()
        self._num_kept_bytes = 0
        self._lock = threading.Lock()

    def read(self, data: bytes) -> Picture:
        """DataError where it is no picture."""
        key = hashlib.blake2b(data, digest_size=16).hexdigest()
        _, (_, height, width) = self._cut(key, data)
        merge = int(self.processor.merge_size)
        return Picture(key=key, data=data, rows=height // merge, columns=width // merge)

    def written(self, text: str, placeholder: str, files: Sequence[bytes]) -> str:
        """A prompt with as many placeholders as each picture has tokens, where the chat template wrote one."""
        before, *rest = text.split(placeholder)
        if len(rest) != len(files):
            raise DataError(
                f"the chat template writes {len(rest)} times {placeholder} for {len(files)} pictures: it has no place "
                f"for pictures, or a message has {placeholder} in its text"
            )
        counts = [self.read(file).num_tokens for file in files]
        return before + "".join(
            placeholder * count + after for count, after in zip(counts, rest, strict=True)
        )

    def placed(self, files: Sequence[bytes], token_ids: TokenIds, start: int = 0) -> tuple[Picture, ...]:
        """The pictures where they stand in what `written` was encoded to; its first token is number `start`."""
        places, at, found = np.flatnonzero(np.asarray(token_ids) == self.token_id), 0, []
        for file in files:
            picture = self.read(file)
            found.append(replace(picture, start=start + int(places[at])))
            at += picture.num_tokens
        return tuple(found)

    def patches(self, picture: Picture) -> tuple[Tensor, tuple[int, int, int]]:
        """[P, channels · frames · height · width] in float32, and the grid they lie on: frames, rows, columns."""
        return self._cut(picture.key, picture.data)

    @cached_property
    def processor(self) -> Any:
        pillow()  # asked first: transformers' own word for its absence is longer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        if self._folder is not None and (self._folder / "preprocessor_config.json").is_file():
            return Qwen2VLImageProcessorPil.from_pretrained(self._folder, local_files_only=True)
        vision = self._vision
        side = vision.patch_size * vision.spatial_merge_size
        return Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            size={"shortest_edge": MIN_TOKENS * side**2, "longest_edge": 1280 * side**2},
        )

    def _cut(self, key: str, data: bytes) -> tuple[Tensor, tuple[int, int, int]]:
        with self._lock:
            known = self._patches.get(key)
            if known is not None:
                self._patches.move_to_end(key)
                return known
            try:
                cut = self.processor(images=_opened(data), return_tensors="pt")
            except (ValueError, OSError) as error:
                raise DataError(f"a picture of {len(data)} bytes cannot be used: {error}") from error
            frames, height, width = cut["image_grid_thw"][0].tolist()
            found = (cut["pixel_values"].float(), (frames, height, width))
            self._patches[key] = found
            self._num_kept_bytes += found[0].nbytes
            while self._num_kept_bytes > MAX_KEPT_BYTES and len(self._patches) > 1:
                _, (oldest, _) = self._patches.popitem(last=False)
                self._num_kept_bytes -= oldest.nbytes
            return found


def load_pictures(config: ModelConfig) -> PictureReader | None:
    """None: the model reads no pictures."""
    model_config = load_model_config(config)
    if not reads_pictures(model_config):
        return None
    folder = Path(model_folder(config.path, weights=False)) if config.path else None
    return PictureReader(model_config, folder)


def rope_positions(length: int, pictures: Sequence[Picture]) -> tuple[Positions, int]:
    """([3, length], shift): what a token is turned by in time, height and width (M-RoPE), and how far what follows the
    sequence lies from its index.

    Letters count on alike in all three. A picture's tokens stand still in time and count their row and column from
    where it begins; what follows goes on behind the larger of both.
    """
    positions_3T = np.empty((3, length), dtype=np.int64)
    at = position = 0
    for picture in pictures:
        positions_3T[:, at : picture.start] = np.arange(position, position + picture.start - at)
        position += picture.start - at
        grid = np.indices((1, picture.rows, picture.columns)).reshape(3, -1)
        positions_3T[:, picture.start : picture.end] = grid + position
        position += max(picture.rows, picture.columns)
        at = picture.end
    positions_3T[:, at:] = np.arange(position, position + length - at)
    return positions_3T, position - at


def _opened(data: bytes) -> Any:
    pil = pillow()
    try:
        return pil.Image.open(io.BytesIO(data)).convert("RGB")
    except (pil.UnidentifiedImageError, pil.Image.DecompressionBombError, SyntaxError) as error:
        raise DataError(f"{len(data)} bytes are no picture that can be read: {error}") from error
