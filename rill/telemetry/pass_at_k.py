"""pass@k with confidence intervals.

pass@k is the unbiased estimate 1 − C(n−c, k)/C(n, k) from n samples with c right. A sample is right when its reward
reaches RIGHT. The 95 % interval is Wilson's for one sample a prompt; for several it is a bootstrap over prompts, whose
answers are alike, and Wilson's with the number of prompts where all prompts came out the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RIGHT = 1.0 - 1e-6
Z_95 = 1.959964
NUM_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    mean: float
    low: float
    high: float


def pass_counts(num_samples: int) -> list[int]:
    """1, 2, 4, … and the number of samples itself."""
    counts = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return counts if counts[-1] == num_samples else [*counts, num_samples]


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> Estimate:
    per_prompt = np.array([_pass_at_k(len(row), sum(r >= RIGHT for r in row), k) for row in rewards])
    mean, count = float(per_prompt.mean()), len(per_prompt)
    if k == 1 and all(len(row) == 1 for row in rewards):
        return _wilson(mean, count)
    if np.ptp(per_prompt) == 0.0:  # a bootstrap would be sure of it
        return _wilson(mean, count)
    low, high = bootstrap(per_prompt)
    return Estimate(mean=mean, low=low, high=high)


def bootstrap(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, over resampled prompts; the same every time."""
    rng, count = np.random.default_rng(0), len(values)
    means = [values[rng.integers(count, size=count)].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _wilson(share: float, count: int) -> Estimate:
    centre = (share + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
    half = Z_95 * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2)) / (1 + Z_95**2 / count)
    return Estimate(mean=share, low=max(0.0, centre - half), high=min(1.0, centre + half))
