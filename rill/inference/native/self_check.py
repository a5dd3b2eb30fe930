"""Before it serves a model, the engine compares itself with the model's own eager modules on a few tokens.

    tokens   t t t t t │ t t t t t │ t │ t       a prompt, its second part, then one token at a time: every kind of step

Once at the beginning of a sequence and once at the end of the longest one, where some models scale by position; with a
picture across the first cut, where the model reads pictures. The decoder that differs gives way to the modules; modules
that differ are refused. Called by runners.py at load, with a small cache of its own.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from rill.inference.base import Request
from rill.inference.native.batch import BatchBuilder, Int64s
from rill.inference.native.model_runner import ModelRunner, refusal
from rill.inference.native.scheduler import Chunk, Work
from rill.inference.native.sequence import Sequence
from rill.models.eager import TOLERANCES, check_tokens, difference, eager_logits
from rill.models.loading import reads_pictures
from rill.models.pictures import rope_positions
from rill.models.vision import CheckPicture, check_picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

CUTS = (0, 5, 10, 11, 12)
"""Where the steps begin and end."""

FP8_TOLERANCE = 0.5
"""Relative difference of logits that 8 bits explain; what a wrong scale gives is larger."""

Case = tuple[Int64s, int | CheckPicture, torch.Tensor]
"""Tokens, where the first of them stands or the picture that is among them, and the modules' logits."""


def expected_logits(model: PreTrainedModel, max_len: int) -> list[Case]:
    """What the modules compute, while they are whole. max_len: of the longest sequence."""
    ids = check_tokens(model)[:, :max_len]
    numbers = ids[0].cpu().numpy().astype(np.int64)
    firsts = sorted({0, max_len - len(numbers)})
    cases: list[Case] = [(numbers, first, eager_logits(model, ids, first)) for first in firsts]
    if reads_pictures(model.config) and len(numbers) == CUTS[-1]:
        shown = check_picture(model, ids)
        logits = eager_logits(model, shown.ids_1T, shown=shown.arguments)
        cases.append((shown.ids_1T[0].cpu().numpy().astype(np.int64), shown, logits))
    return cases


def check_runner(runner: ModelRunner, cases: list[Case]) -> None:
    """ModelError where the engine would compute something else than the model."""
    model = runner.model
    if not _are_finite(cases):
        return
    limit = TOLERANCES[model.dtype]
    if runner.decoder is not None:
        found = _largest(runner, cases)
        if found <= limit:
            return
        logger.info(
            "%s runs through its modules: the decoder's logits differ by %.1e", model.config.model_type, found
        )
        runner.use_modules()
    found = _largest(runner, cases)
    if not found <= limit:
        raise refusal(model, f"its logits differ from its own modules' by {found:.1e} (limit {limit:.0e})")


def check_quantized(runner: ModelRunner, cases: list[Case]) -> None:
    """The same once weights or cache have fewer bits: ModelError where they cost more than these explain."""
    if _are_finite(cases) and not (found := _largest(runner, cases)) <= FP8_TOLERANCE:
        raise refusal(
            runner.model,
            f"with fewer bits its logits differ from its modules' by {found:.2f} (limit {FP8_TOLERANCE})",
        )


def _are_finite(cases: list[Case]) -> bool:
    """Else weights are no numbers, which the first request will say; nothing can be compared."""
    return all(bool(torch.isfinite(logits).all()) for *_, logits in cases)


def _largest(runner: ModelRunner, cases: list[Case]) -> float:
    return max(
        difference(_logits(runner, ids, place), logits.to(runner.device)) for ids, place, logits in cases
    )


@torch.inference_mode()
def _logits(runner: ModelRunner, ids: Int64s, place: int | CheckPicture) -> torch.Tensor:
    """`place`: where the first token stands, or the picture that is among them."""
    first, tokens = 0, array("i", ids.tolist())
    seq = Sequence(
        request=Request(id="check", token_ids=ids.astype(np.int32)), seed=0, arrival=0, tokens=tokens, slot=0
    )
    if isinstance(place, CheckPicture):
        assert runner.vision is not None
        runner.vision.remember(place)
        seq.request = replace(seq.request, pictures=(place.picture,))
        seq.rope = rope_positions(len(tokens), [place.picture])
    else:
        first = place
    size = runner.cache_shape.block_size
    seq.block_ids = list(range(1, -(-len(tokens) // size) + 1))  # block 0 is a bin
    builder = BatchBuilder(1, len(seq.block_ids), size)
    runner.allocate_cache(len(seq.block_ids) + 1)
    parts = []
    try:
        for begin, end in pairwise(cut for cut in CUTS if cut <= len(tokens)):
            seq.num_computed = end
            chunk = Chunk(seq, begin, end - begin, is_last=False)
            [step] = builder.build(Work([], [], [], [chunk], has_special=False))
            parts.append(runner.all_logits(replace(step, positions_N=step.positions_N + first)).float())
    finally:
        runner.free_cache()
    return torch.cat(parts)
