"""A curriculum as the loop's source of prompts: what became of every group decides what is asked next.

The controller calls `learn` as groups finish and `next` as it admits. Reports wait until the next draw and are then
applied in the order of admission, so that at lag 0 the draws do not depend on which group finished first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rill.data.curriculum import Curriculum
from rill.types import Prompt


class CurriculumSource:
    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum = curriculum
        self._waiting: list[tuple[int, Prompt, float]] = []

    def next(self, count: int) -> list[Prompt]:
        self._apply()
        return self._curriculum.next(count)

    def learn(self, index: int, prompt: Prompt, reward: float) -> None:
        """A group counts as right by its mean reward, cut to 0…1; groups that a filter dropped count too. `index`: its
        place in the order of admission."""
        self._waiting.append((index, prompt, min(1.0, max(0.0, reward))))

    def metrics(self) -> dict[str, float]:
        return self._curriculum.metrics()

    def state(self) -> dict[str, Any]:
        self._apply()
        return self._curriculum.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._curriculum.load_state(state)

    def _apply(self) -> None:
        waiting, self._waiting = sorted(self._waiting, key=lambda report: report[0]), []
        for _, prompt, success in waiting:
            self._curriculum.report(prompt, success)
