"""Two evaluations on the same prompts compared: the difference, its interval, and whether it could be chance.

Called by `rill runs compare`. Prompts are the unit: answers to one prompt are alike, so counting them one by one would
make every difference look certain. d_i = share of right answers of B minus that of A to prompt i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rill.telemetry.pass_at_k import RIGHT, bootstrap

NUM_FLIPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    num_prompts: int
    first: float
    """Share of right answers."""
    second: float
    low: float
    """95 % interval of second − first, by bootstrap over prompts."""
    high: float
    p_value: float
    """Two-sided: how often chance alone would make the two differ so much."""
    num_gained: int
    """Prompts that the second does better on."""
    num_lost: int

    @property
    def difference(self) -> float:
        return self.second - self.first


def compare(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Paired | None:
    """Rewards by prompt; prompts that only one of them has are left out. None: they share none."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    a = np.array([_right(first[prompt]) for prompt in shared])
    b = np.array([_right(second[prompt]) for prompt in shared])
    difference = b - a
    low, high = bootstrap(difference)
    return Paired(
        num_prompts=len(shared),
        first=float(a.mean()),
        second=float(b.mean()),
        low=low,
        high=high,
        p_value=sign_flip_p(difference),
        num_gained=int((difference > 0).sum()),
        num_lost=int((difference < 0).sum()),
    )


def sign_flip_p(difference_P: npt.NDArray[np.float64]) -> float:
    """The two-sided paired permutation test: under chance every d_i might as well have the other sign.

    Where all d_i are −1, 0 or 1 this is McNemar's exact test, Σ_{j ≤ min(n₊, n₋)} C(n, j) / 2^(n−1).
    """
    moved = difference_P[difference_P != 0]
    if moved.size == 0:
        return 1.0
    if np.all(np.abs(moved) == 1):
        count, less = int(moved.size), int(min((moved > 0).sum(), (moved < 0).sum()))
        tail: int = sum(math.comb(count, j) for j in range(less + 1))
        return min(1.0, 2.0 * tail / 2.0**count)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(NUM_FLIPS, moved.size))
    is_as_far = np.abs(signs @ moved) >= abs(moved.sum()) - 1e-12
    return float((is_as_far.sum() + 1) / (NUM_FLIPS + 1))


def _right(rewards: Sequence[float]) -> float:
    return sum(reward >= RIGHT for reward in rewards) / len(rewards)
