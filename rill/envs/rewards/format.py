"""Form, not content: `format` checks the usual shapes, `regex` any pattern of the user's."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

from pydantic import field_validator

from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.envs.rewards.base import InlineReward, Isolation, RewardConfig
from rill.types import Prompt, Trajectory


class Shape(StrEnum):
    THINK = "think"  # <think>…</think> once, then something after it
    THINK_ANSWER = "think_answer"  # <think>…</think> then <answer>…</answer>, nothing after
    BOXED = "boxed"
    NUMBER = "number"  # nothing but one number
    HASHES = "hashes"


class FormatReward(InlineReward):
    class Config(RewardConfig):
        type: Literal["format"] = "format"
        shape: Shape = Shape.THINK_ANSWER
        matched: float = 1.0
        unmatched: float = 0.0

    config: Config

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        return self.config.matched if has_shape(response_text, self.config.shape) else self.config.unmatched


def has_shape(text: str, shape: Shape) -> bool:
    """Plain string scans: linear in the text."""
    match shape:
        case Shape.THINK:
            return _thought_then(text) is not None
        case Shape.THINK_ANSWER:
            rest = _thought_then(text)
            if rest is None or not (rest.startswith("<answer>") and rest.endswith("</answer>")):
                return False
            return rest.count("<answer>") == 1 and rest.count("</answer>") == 1
        case Shape.BOXED:
            return extract_answer(text, AnswerForm.BOXED) is not None
        case Shape.NUMBER:
            return re.fullmatch(r"\s*[-+]?\d+(\.\d+)?\s*", text) is not None
        case Shape.HASHES:
            return bool(extract_answer(text, AnswerForm.HASHES))


def _thought_then(text: str) -> str | None:
    """What follows one well-formed <think> block, if something does."""
    text = text.strip()
    if text.count("<think>") > 1 or text.count("</think>") != 1:
        return None
    # Some templates write the opening tag into the prompt, so it may be absent from the response.
    head, _, rest = text.partition("</think>")
    if "<think>" in head and not head.startswith("<think>"):
        return None
    return rest.strip() or None


class RegexReward:
    """Runs in a worker process: a pattern with nested repeats can take for ever, holding the interpreter lock."""

    class Config(RewardConfig):
        type: Literal["regex"] = "regex"
        pattern: str
        """A Python regular expression, searched in the response (`^` and `$` anchor it). Dot matches line feeds."""
        compare: bool = False
        """Take the pattern's first group as the answer and compare it with the expected one."""
        matched: float = 1.0
        unmatched: float = 0.0

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, pattern: str) -> str:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
            return pattern

    isolation = Isolation.PROCESS

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        if self.config.compare and prompt.answer is None:
            raise ValueError(f"prompt {prompt.id} has no answer to compare with")
        found = self._pattern.search(response_text)
        if found is not None and self.config.compare:
            given = found.group(1) if self._pattern.groups else found.group(0)
            is_match = (given or "").strip() == str(prompt.answer).strip()
        else:
            is_match = found is not None
        return self.config.matched if is_match else self.config.unmatched
