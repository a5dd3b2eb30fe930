"""Held-out evaluation: pass@k with confidence intervals, on the engines that generate anyway.

pass@k is the unbiased estimate 1 − C(n−c, k)/C(n, k) from n samples with c right. A sample is right when its reward
reaches RIGHT. The interval is Wilson's at 95 % for one sample a prompt, and a normal one over prompts otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rill.types import Prompt
from rill.workflows.fleet import Fleet
from rill.workflows.sections import EvalConfig

RIGHT = 1.0 - 1e-6
Z_95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    mean: float
    low: float
    high: float


class Evaluator:
    def __init__(self, config: EvalConfig, fleet: Fleet, prompts: Sequence[Prompt], timeout_s: float) -> None:
        self.config = config
        self._fleet = fleet
        self._prompts = list(prompts)
        self._timeout_s = timeout_s

    def is_due(self, step: int, last_step: int) -> bool:
        return step == last_step or (self.config.every > 0 and step % self.config.every == 0)

    def run(self) -> dict[str, float]:
        if not self._prompts:
            return {}
        rewards = self._fleet.evaluate(self._prompts, self.config, self._timeout_s)
        return summarise_rewards(rewards)


def summarise_rewards(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures of an evaluation; one row of rewards to a prompt."""
    num_samples = min(len(row) for row in rewards)
    figures = {
        "eval/reward": float(np.mean([np.mean(row) for row in rewards])),
        "eval/prompts": float(len(rewards)),
    }
    for k in pass_counts(num_samples):
        estimate = pass_at_k(rewards, k)
        name = "eval/accuracy" if k == 1 else f"eval/pass@{k}"
        figures[name] = estimate.mean
        figures[f"{name}_low"], figures[f"{name}_high"] = estimate.low, estimate.high
    return figures


def pass_counts(num_samples: int) -> list[int]:
    """1, 2, 4, … and the number of samples itself."""
    counts = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return counts if counts[-1] == num_samples else [*counts, num_samples]


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> Estimate:
    per_prompt = np.array([_pass_at_k(len(row), sum(r >= RIGHT for r in row), k) for row in rewards])
    mean, count = float(per_prompt.mean()), len(per_prompt)
    if k == 1 and all(len(row) == 1 for row in rewards):
        return _wilson(mean, count)
    spread = Z_95 * float(per_prompt.std(ddof=1)) / math.sqrt(count) if count > 1 else 1.0
    return Estimate(mean=mean, low=max(0.0, mean - spread), high=min(1.0, mean + spread))


def _pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _wilson(share: float, count: int) -> Estimate:
    centre = (share + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
    half = Z_95 * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2)) / (1 + Z_95**2 / count)
    return Estimate(mean=share, low=max(0.0, centre - half), high=min(1.0, centre + half))
