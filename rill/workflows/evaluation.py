"""Evaluation: which prompts, and what their rewards say. The controller puts them through the engines of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rill.data.base import open_indexed, prompts_of
from rill.errors import GuardError
from rill.telemetry.pass_at_k import pass_at_k, pass_counts
from rill.types import Prompt
from rill.workers.config import HELD_OUT, EvalSetConfig
from rill.workers.records import Outcome, Task


class Evaluation:
    """Every set once, again and again."""

    def __init__(self, sets: Mapping[str, EvalSetConfig]) -> None:
        self._sets = {name: (chosen, read_prompts(chosen)) for name, chosen in sets.items()}
        self._outcomes: dict[tuple[str, int], Outcome] = {}

    def begin(self, epoch: int) -> list[Task]:
        """What is to be done for the next one."""
        self._outcomes = {}
        return [
            Task(index=n, prompt=prompt, num_samples=chosen.samples, purpose=name, epoch=epoch)
            for name, (chosen, prompts) in self._sets.items()
            for n, prompt in enumerate(prompts)
        ]

    def collect(self, outcome: Outcome) -> None:
        self._outcomes[outcome.purpose, outcome.index] = outcome

    @property
    def num_done(self) -> int:
        return len(self._outcomes)

    def check_some_succeeded(self) -> None:
        """A reward or environment that fails every time would fail for as long as the run lasts."""
        found = list(self._outcomes.values())
        if found and all(math.isnan(reward) for outcome in found for reward in outcome.rewards):
            raise GuardError(
                f"every episode of the first evaluation failed: {found[-1].error}; mend the reward or the environment"
            )

    def metrics(self) -> dict[str, float]:
        """Of every set, and of every task where a set has prompts of several."""
        metrics: dict[str, float] = {}
        for name, (_, prompts) in self._sets.items():
            rows = [self._outcomes[name, n].rewards for n in range(len(prompts))]
            metrics |= summarise_rewards(rows, name)
            tasks = dict.fromkeys(prompt.task for prompt in prompts if prompt.task)
            for task in tasks if len(tasks) > 1 else ():
                chosen = [row for row, prompt in zip(rows, prompts, strict=True) if prompt.task == task]
                metrics |= summarise_rewards(chosen, name, task)
        return metrics


def read_prompts(config: EvalSetConfig) -> list[Prompt]:
    """The prompts of a set, the first `num_prompts` of its side of the data."""
    return list(prompts_of(open_indexed(config.data, config.split), config.num_prompts))


def summarise_rewards(
    rows: Sequence[Sequence[float]], name: str = HELD_OUT, task: str = ""
) -> dict[str, float]:
    """Metrics of a set, or of one task in it; one row of rewards to a prompt. An episode that failed has no number: it
    is counted, and is not right."""
    if not rows:
        return {}
    place = "/".join(["eval", *([] if name == HELD_OUT else [name]), *([task] if task else [])])
    scored = [reward for row in rows for reward in row if not math.isnan(reward)]
    num_samples = min(len(row) for row in rows)
    metrics = {
        f"{place}/prompts": float(len(rows)),
        f"{place}/errors": 1.0 - len(scored) / sum(len(row) for row in rows),
    }
    if scored:
        metrics[f"{place}/reward"] = float(np.mean(scored))
    for k in pass_counts(num_samples):
        estimate = pass_at_k(rows, k)
        what = f"{place}/accuracy" if k == 1 else f"{place}/pass@{k}"
        metrics[what] = estimate.mean
        metrics[f"{what}_low"], metrics[f"{what}_high"] = estimate.low, estimate.high
    return metrics
