"""Mathematical equivalence by math-verify: 1/2, 0.5 and \\frac{1}{2} are one answer. The one door for math_verify.

Runs in a worker process: the symbolic comparison can take for ever and cannot be interrupted.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.envs.rewards.base import Isolation, RewardConfig
from rill.registry import import_extra
from rill.types import Prompt, Trajectory


class MathReward:
    class Config(RewardConfig):
        type: Literal["math"] = "math"
        answer: AnswerForm | None = None
        """Where the answer stands. Unset: math-verify searches the response (boxed first, then expressions); several
        boxed answers then count as one set. "boxed": the last one alone."""
        decimals: int = 6
        """Digits after the point that numbers are compared to."""
        correct: float = 1.0
        wrong: float = 0.0

    isolation = Isolation.PROCESS

    def __init__(self, config: Config) -> None:
        self.config = config
        self._verify = _math_verify()

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        config, library = self.config, self._verify
        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.id} has no answer to compare with")
        given = response_text
        if config.answer is not None:
            found = extract_answer(response_text, config.answer)
            if found is None:
                return config.wrong
            given = found
        # No time limits of the library's own: they use signals, and the runner's deadline stands anyway.
        expected = library.parse(_as_math(str(prompt.answer)), parsing_timeout=None)
        if not expected:
            raise ValueError(
                f"prompt {prompt.id}: the answer {prompt.answer!r} is not mathematics that can be read"
            )
        if config.answer is not None:
            given = _as_math(given)
        written = library.parse(given, parsing_timeout=None)
        is_same = library.verify(expected, written, float_rounding=config.decimals, timeout_seconds=None)
        return config.correct if is_same else config.wrong


def _as_math(text: str) -> str:
    """A bare expression is put between dollars, where the parser looks for one."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _math_verify() -> Any:
    math_verify = import_extra("math_verify", 'the math reward needs: pip install "rill[math]"')
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    return math_verify
