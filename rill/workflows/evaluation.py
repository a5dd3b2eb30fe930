"""Evaluation: which prompts, and what their rewards say. The controller puts them through the engines of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rill.data.base import open_indexed, prompts_of
from rill.telemetry.pass_at_k import pass_at_k, pass_counts
from rill.types import Prompt
from rill.workflows.config import HELD_OUT, EvalSetConfig


def read_prompts(config: EvalSetConfig) -> list[Prompt]:
    """The prompts of a set, the first `num_prompts` of its side of the data."""
    return list(prompts_of(open_indexed(config.data, config.split), config.num_prompts))


def place_of(name: str) -> str:
    """What the metrics of a set are called after."""
    return "eval" if name == HELD_OUT else f"eval/{name}"


def summarise_rewards(rows: Sequence[Sequence[float]], name: str = HELD_OUT) -> dict[str, float]:
    """Metrics of an evaluation; one row of rewards to a prompt. An episode that failed has no number: it is counted,
    and is not right."""
    if not rows:
        return {}
    place = place_of(name)
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


def summarise_tasks(
    rewards: Mapping[int, Sequence[float]], tasks: Sequence[str], name: str = HELD_OUT
) -> dict[str, float]:
    """The same by task, where an evaluation has prompts of several. `rewards`: by the prompt's place in `tasks`."""
    place = place_of(name)
    metrics: dict[str, float] = {}
    named = dict.fromkeys(task for task in tasks if task)
    for task in named if len(named) > 1 else ():
        found = summarise_rewards([row for n, row in rewards.items() if tasks[n] == task])
        metrics |= {f"{place}/{task}/{key.removeprefix('eval/')}": value for key, value in found.items()}
    return metrics
