"""A question that can only be answered by looking something up: every vault holds other values, so nothing can be
learnt by heart. Played in the environment `vault`, whose tool opens the vault.

    abc:k7?    ><get>k7</get>[q2]<get>q2</get>[42]=42         the level is the number of look-ups
    abc:k7?    >=42                                           a guess

`worked` is the share of the warm-up's examples that use the tool; the others guess. Both styles begin with the same
character, so that a warmed-up model has to find out which one pays.
"""

from __future__ import annotations

import hashlib
import random
from typing import Literal

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset

OPEN, CLOSE = "<get>", "</get>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class VaultDataset(TaskDataset):
    name = "vault"
    default_levels = (2, 2)

    class Config(TaskConfig):
        type: Literal["vault"] = "vault"
        worked_template: str = ">{steps}={answer}"
        step_separator: str = ""

    def make(self, rng: random.Random, level: int) -> Problem:
        vault = "".join(rng.choice(LETTERS) for _ in range(3))
        first = key = f"{rng.choice(LETTERS)}{rng.randint(0, 9)}"
        steps = []
        for left in reversed(range(level)):
            found = look_up(vault, key, is_last=left == 0)
            steps.append(f"{OPEN}{key}{CLOSE}[{found}]")
            key = found
        return Problem(
            question=f"{vault}:{first}?",
            instruction=f"What does vault {vault} hold at the end of the chain that begins with {first}?",
            answer=key,
            steps=tuple(steps),
            difficulty=float(level),
        )

    def solution(self, problem: Problem, index: int) -> str:
        whole = super().solution(problem, index)
        return whole if whole.startswith(">") else f">={problem.answer}"


def look_up(vault: str, key: str, *, is_last: bool) -> str:
    """What lies in the vault under a key: another key, or at the end of a chain a number."""
    digest = hashlib.blake2b(f"{vault}/{key}".encode(), digest_size=2).digest()
    return f"{10 + digest[0] % 90}" if is_last else f"{LETTERS[digest[0] % 26]}{digest[1] % 10}"
