"""Preference rows as two sequences each: what reward models and DPO learn from (rill.training.preference).

Callers: the workflows `reward_model` and `dpo`. A pair's two answers follow the same tokens, those that an engine would
be given.
"""

from __future__ import annotations

from dataclasses import dataclass

from rill.data.rows import CHOSEN, MARGIN, REJECTED
from rill.data.sft import SFTEncoder, SFTExample
from rill.errors import DataError
from rill.types import Bits, Floats, Picture, Prompt, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole sequence, prompt included."""

    token_ids: TokenIds
    loss_mask: Bits
    """True on the answer's own tokens."""
    ref_logprobs: Floats | None = None
    """The reference's, aligned with token_ids. None: the trainer asks its reference."""
    pictures: tuple[Picture, ...] = ()
    """In the prompt."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first of its own."""
        return int(self.loss_mask.argmax())


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """One of the two may be None where a loss takes answers one by one (KTO)."""

    id: str
    chosen: Answer | None
    rejected: Answer | None
    margin: float = 0.0
    """How much better the chosen one was rated, in reward units. 0: not known."""

    @property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(a for a in (self.chosen, self.rejected) if a is not None)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def answers_of(prompt: Prompt) -> tuple[str, str]:
    """The chosen and the rejected one."""
    try:
        chosen, rejected = str(prompt.metadata[CHOSEN]), str(prompt.metadata[REJECTED])
    except KeyError:
        raise DataError(
            f"prompt {prompt.id} is no preference: its row needs `chosen` and `rejected` answers"
        ) from None
    if chosen == rejected:
        raise DataError(f"prompt {prompt.id}: the chosen and the rejected answer are the same")
    return chosen, rejected


def encode_pair(encoder: SFTEncoder, prompt: Prompt) -> PreferencePair:
    chosen, rejected = answers_of(prompt)
    return PreferencePair(
        id=prompt.id,
        chosen=_answer(encoder.answered(prompt, chosen)),
        rejected=_answer(encoder.answered(prompt, rejected)),
        margin=float(prompt.metadata[MARGIN]),
    )


def _answer(example: SFTExample) -> Answer:
    return Answer(token_ids=example.token_ids, loss_mask=example.loss_mask, pictures=example.pictures)
