"""Preference rows as two sequences each: what reward models and DPO learn from.

Callers: the workflows `reward_model` and `dpo`. A pair's two answers follow the same tokens, those that an engine would
be given.
"""

from __future__ import annotations

from dataclasses import dataclass

from rill.data.rows import CHOSEN, MARGIN, REJECTED
from rill.data.sft import SFTEncoder, SFTExample
from rill.errors import DataError
from rill.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PairExample:
    """Two answers to one prompt."""

    id: str
    chosen: SFTExample
    rejected: SFTExample
    margin: float
    """How much better the chosen one was rated. 0: not known."""


def encode_pair(encoder: SFTEncoder, prompt: Prompt) -> PairExample:
    try:
        chosen, rejected = str(prompt.metadata[CHOSEN]), str(prompt.metadata[REJECTED])
    except KeyError:
        raise DataError(
            f"prompt {prompt.id} is no preference: its row needs `chosen` and `rejected` answers"
        ) from None
    if chosen == rejected:
        raise DataError(f"prompt {prompt.id}: the chosen and the rejected answer are the same")
    return PairExample(
        id=prompt.id,
        chosen=encoder.answered(prompt, chosen),
        rejected=encoder.answered(prompt, rejected),
        margin=float(prompt.metadata[MARGIN]),
    )
