"""The part of a vision-language model that looks: the tower's features, put in the place of placeholders.

    patches ── tower ──▶ features ── into the rows of placeholders ──▶ decoder
                            └── deeper features, added behind the decoder's first layers (Qwen3-VL's deepstack)

Served and trained are the models of Qwen's family (rill.models.loading.VISION_TYPES): a tower `visual`, a decoder
`language_model`, positions in time, height and width. Callers: rill.inference.native, rill.training.module.

Axes: N token of the flat batch, P picture token, D depth (0 the embedding, then one for each deepstack layer), E width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rill.models.pictures import PictureReader, Positions
from rill.types import Picture

MAX_KEPT_TOKENS = 65_536
"""Picture tokens whose features an engine remembers."""
MAX_PATCHES = 32_768
"""Of one pass through the tower."""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Tokens [first, first + count) of a picture, at `row` of a flat batch."""

    picture: Picture
    row: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class PictureRows:
    """What pictures there are in a flat batch, in the order of its rows, and where all of its tokens stand."""

    spans: list[PictureSpan]
    positions_3N: Positions


@dataclass(frozen=True, slots=True)
class VisualRows:
    """The same on the device, with features in place of pictures."""

    rows_P: Tensor
    features_DPE: Tensor
    positions_3N: Tensor

    def decoder_inputs(self, embedded_NE: Tensor) -> dict[str, Any]:
        """Keyword arguments of the decoder's own module, in place of input_ids and position_ids."""
        inputs: dict[str, Any] = {
            "inputs_embeds": embedded_NE.index_copy(0, self.rows_P, self.features_DPE[0])[None],
            "position_ids": self.positions_3N[:, None],
        }
        if len(self.features_DPE) > 1 and len(self.rows_P):
            mask_N = torch.zeros(len(embedded_NE), dtype=torch.bool, device=embedded_NE.device)
            inputs["visual_pos_masks"] = mask_N.index_fill(0, self.rows_P, True)[None]
            inputs["deepstack_visual_embeds"] = list(self.features_DPE[1:])
        return inputs


class VisionTower:
    """Computes features of pictures; each is computed once for as long as the weights stay."""

    def __init__(self, model: Any, reader: PictureReader) -> None:
        self._base: Any = model.base_model
        self._reader = reader
        self.token_id = reader.token_id
        self.tower: torch.nn.Module = self._base.visual
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def remember(self, check: CheckPicture) -> None:
        """What stands for its key, without a file."""
        patches, grids = (check.arguments[name] for name in ("pixel_values", "image_grid_thw"))
        (self._kept[check.picture.key],) = self.features_of(patches, grids.tolist())

    def forget(self) -> None:
        """The weights have changed."""
        self._kept.clear()

    def rows(self, wanted: PictureRows, *, one_by_one: bool = False) -> VisualRows:
        """For inference. `one_by_one`: a picture's features do not depend on what else is in the batch."""
        new = {s.picture.key: s.picture for s in wanted.spans if s.picture.key not in self._kept}
        for part in self._passes(list(new.values()), 1 if one_by_one else MAX_PATCHES):
            self._kept.update(zip((p.key for p in part), self.features(part), strict=True))
        found = self._placed(wanted, self._kept)
        for span in wanted.spans:
            self._kept.move_to_end(span.picture.key)
        num_tokens = sum(f.shape[1] for f in self._kept.values())
        while num_tokens > MAX_KEPT_TOKENS and len(self._kept) > 1:
            num_tokens -= self._kept.popitem(last=False)[1].shape[1]
        return found

    def trained_rows(self, wanted: PictureRows) -> VisualRows:
        """With gradients; a picture that is shown several times in a row is computed once."""
        pictures = list({span.picture.key: span.picture for span in wanted.spans}.values())
        features = self.features(pictures) if pictures else []
        return self._placed(wanted, {p.key: f for p, f in zip(pictures, features, strict=True)})

    def features(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """[D, P, E] of each."""
        cut = [self._reader.patches(picture) for picture in pictures]
        return self.features_of(torch.cat([patches for patches, _ in cut]), [grid for _, grid in cut])

    def features_of(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        device = next(self.tower.parameters()).device
        out = self._base.get_image_features(
            patches.to(device), torch.tensor(grids, device=device), return_dict=True
        )
        deep = out.deepstack_features if "deepstack_features" in out else None
        sizes = [len(features) for features in out.pooler_output]
        depths = [torch.cat(list(out.pooler_output)), *(deep or ())]
        return list(torch.split(torch.stack(depths), sizes, dim=1))

    def silent(self) -> Tensor:
        """A zero that reaches every parameter of the tower: where ranks must keep step and this one has no picture."""
        vision = self._base.visual.config
        size = int(vision.spatial_merge_size)
        (features,) = self.features_of(torch.zeros(size * size, _width(vision)), [(1, size, size)])
        return features.sum() * 0.0

    def _passes(self, pictures: list[Picture], max_patches: int) -> list[list[Picture]]:
        parts: list[list[Picture]] = []
        room = 0
        for picture in pictures:
            size = len(self._reader.patches(picture)[0])
            if not parts or size > room:
                parts.append([])
                room = max_patches
            parts[-1].append(picture)
            room -= size
        return parts

    def _placed(self, wanted: PictureRows, features: dict[str, Tensor]) -> VisualRows:
        parameter = next(self.tower.parameters())
        device = parameter.device
        rows = [np.arange(s.row, s.row + s.count) for s in wanted.spans] or [np.zeros(0, np.int64)]
        parts = [features[s.picture.key][:, s.first : s.first + s.count] for s in wanted.spans]
        width = int(self._base.config.get_text_config().hidden_size)
        found = torch.cat(parts, dim=1) if parts else parameter.new_zeros(1, 0, width)
        return VisualRows(
            torch.from_numpy(np.concatenate(rows)).to(device),
            found,
            torch.from_numpy(wanted.positions_3N).to(device),
        )


@dataclass(frozen=True, slots=True)
class CheckPicture:
    """A picture of noise among a few tokens: what engine and trainer are held against the model's own modules with."""

    ids_1T: Tensor
    picture: Picture
    arguments: dict[str, Tensor]
    """Of the model's own forward."""


def check_picture(model: Any, ids_1T: Tensor) -> CheckPicture:
    """2 × 2 placeholders from the third token on."""
    picture = Picture(key="check", data=b"", rows=2, columns=2, start=2)
    token_id, vision = int(model.config.image_token_id), model.config.vision_config
    size = 2 * int(vision.spatial_merge_size)
    ids = torch.where(ids_1T == token_id, 0, ids_1T)
    ids[:, picture.start : picture.end] = token_id
    noise = torch.randn(size * size, _width(vision), generator=torch.Generator().manual_seed(2))
    arguments = {
        "pixel_values": noise.to(ids.device),
        "image_grid_thw": torch.tensor([[1, size, size]], device=ids.device),
        "mm_token_type_ids": (ids == token_id).int(),
    }
    return CheckPicture(ids, picture, arguments)


def _width(vision: Any) -> int:
    """Numbers of one patch."""
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
