"""Supervised examples: token ids with the loss on the assistant's tokens only.

The mask is exact. For a conversation, the tokens before the k-th assistant message must be exactly what the
engine would be given (the render up to there, with the generation prompt), and the tokens up to its end must be
a prefix of the whole conversation's. A template for which this does not hold (one that rewrites earlier turns)
cannot be masked and is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rill.data.base import solution_of
from rill.data.chat import PromptEncoder
from rill.errors import DataError
from rill.types import Bits, Message, Picture, Prompt, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTExample:
    """One sequence to imitate."""

    id: str
    token_ids: TokenIds
    loss_mask: Bits
    pictures: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise DataError(f"{self.id}: {len(self.loss_mask)} mask entries for {len(self.token_ids)} tokens")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def check_written(prompt: Prompt) -> None:
    """Raise DataError where there is nothing to imitate."""
    is_said = bool(prompt.messages) and prompt.messages[-1].role == "assistant"
    if not is_said and not isinstance(prompt.metadata.get("reply"), Message):
        solution_of(prompt)


class SFTEncoder:
    """Builds examples with one PromptEncoder, so training sees the tokens that generation will see."""

    def __init__(self, encoder: PromptEncoder, *, max_tokens: int | None = None) -> None:
        self.encoder = encoder
        self.max_tokens = max_tokens

    def encode(self, prompt: Prompt) -> SFTExample:
        """A written conversation carries loss on every assistant turn; any other prompt on its solution only."""
        messages, reply = prompt.messages, prompt.metadata.get("reply")
        if isinstance(reply, Message):
            messages = (*messages, reply)
        if not messages or messages[-1].role != "assistant":
            return self.answered(prompt, solution_of(prompt))
        spoken = [k for k, message in enumerate(messages) if message.role == "assistant"]
        return self._masked(prompt.id, messages, spoken)

    def answered(self, prompt: Prompt, answer: str) -> SFTExample:
        """The prompt with this answer, which alone carries loss."""
        if prompt.messages:
            messages = (*prompt.messages, Message(role="assistant", content=answer))
            return self._masked(prompt.id, messages, [len(messages) - 1])
        # Plain text: the prompt's ids as the engine gets them, then the answer and the end token.
        start = self.encoder.encode(prompt)
        end_id = self.encoder.tokenizer.eos_token_id
        if end_id is None:
            raise DataError("the tokenizer has no end-of-sequence token: a model could not learn to stop")
        written = self.encoder.encode_text(answer, special=False)
        token_ids = np.concatenate([start, written, np.array([end_id], dtype=np.int32)])
        loss_mask = np.arange(len(token_ids)) >= len(start)
        return self._checked(SFTExample(id=prompt.id, token_ids=token_ids, loss_mask=loss_mask))

    def _masked(self, example_id: str, messages: Sequence[Message], spoken: Sequence[int]) -> SFTExample:
        """Loss on those of the messages."""
        whole = self._ids(messages, add_generation_prompt=False)
        loss_mask = np.zeros(len(whole), dtype=np.bool_)
        for k in spoken:
            start = self._ids(messages[:k], add_generation_prompt=True)
            end = self._ids(messages[: k + 1], add_generation_prompt=False)
            for part, what in ((start, "before"), (end, "up to the end of")):
                if not np.array_equal(whole[: len(part)], part):
                    raise DataError(
                        f"{example_id}: the tokens {what} assistant message {k} are not a prefix of the whole "
                        "conversation's: this chat template rewrites or re-tokenizes earlier turns, so its "
                        "assistant tokens cannot be marked exactly; train on single-turn rows, or use another template"
                    )
            loss_mask[len(start) : self._end_of_speech(whole, len(start), len(end))] = True
        pictures = self.encoder.pictures_in(messages, whole)
        example = SFTExample(id=example_id, token_ids=whole, loss_mask=loss_mask, pictures=pictures)
        return self._checked(example)

    def _end_of_speech(self, ids: TokenIds, start: int, end: int) -> int:
        """Where the model stops writing: after its end token, before the line feed that templates add."""
        special = set(self.encoder.tokenizer.all_special_ids)
        marks = [i for i in range(start, end) if int(ids[i]) in special]
        if marks and not self.encoder.decode(ids[marks[-1] + 1 : end], skip_special=False).strip():
            return marks[-1] + 1
        return end

    def _ids(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        if not messages and not add_generation_prompt:
            return np.empty(0, dtype=np.int32)
        text = self.encoder.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encoder.encode_text(text, special=False)

    def _checked(self, example: SFTExample) -> SFTExample:
        if self.max_tokens is not None and example.num_tokens > self.max_tokens:
            raise DataError(
                f"{example.id}: {example.num_tokens} tokens, the limit is {self.max_tokens}: shorten the row, raise "
                'trainer.micro_batch_tokens, or leave such rows out with trainer.on_too_long = "skip"'
            )
        if not example.loss_mask.any():
            raise DataError(f"{example.id}: no token carries loss")
        return example
