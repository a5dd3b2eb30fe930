"""Evaluations that are kept: what was asked, what was answered and what it was worth, one file each.

    runs/<name>/evaluations/0001.jsonl
        {"time_s": …, "model": …, "metrics": {…}, "config": {…}}                  the first line
        {"set": …, "prompt_id": …, "prompt": …, "response": …, "reward": …}       one line an answer

Written by `rill eval`, read by `rill runs compare`.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rill.errors import UserError
from rill.telemetry.pass_at_k import Estimate, bootstrap
from rill.telemetry.run import Run, write_atomically

FOLDER = "evaluations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    set: str
    prompt_id: str
    prompt: str
    expected: Any
    response: str
    reward: float | None
    """None: the episode failed."""
    error: str | None = None
    num_tokens: int = 0
    """Sampled, by all agents."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the episode: turns, tool calls, tokens that were read, and what its environment counts."""

    @property
    def score(self) -> float:
        return math.nan if self.reward is None else self.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    path: Path
    time_s: float
    model: str
    metrics: Mapping[str, float]
    config: Mapping[str, Any]
    answers: Sequence[Answer]

    def rewards(self) -> dict[str, dict[str, list[float]]]:
        """By set and prompt."""
        return rewards_of(self.answers)


def rewards_of(answers: Sequence[Answer]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for answer in answers:
        found.setdefault(answer.set, {}).setdefault(answer.prompt_id, []).append(answer.score)
    return found


def costs_of(answers: Sequence[Answer], name: str) -> dict[str, Estimate]:
    """What an episode of a set took, on average, with an interval over its prompts: tokens first, then its metrics."""
    chosen = [answer for answer in answers if answer.set == name]
    figures = [{"sampled_tokens": float(answer.num_tokens), **answer.metrics} for answer in chosen]
    found: dict[str, Estimate] = {}
    for what in dict.fromkeys(key for each in figures for key in each):
        by_prompt: dict[str, list[float]] = {}
        for answer, each in zip(chosen, figures, strict=True):
            if what in each:
                by_prompt.setdefault(answer.prompt_id, []).append(each[what])
        means = np.array([np.mean(values) for values in by_prompt.values()])
        low, high = bootstrap(means)
        found[what] = Estimate(mean=float(means.mean()), low=low, high=high)
    return found


def next_path(run: Run) -> Path:
    """A file of its own for an evaluation that begins, empty until it has ended: others may be under way."""
    folder = run.path / FOLDER
    folder.mkdir(exist_ok=True)
    first = max((int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit()), default=0) + 1
    for number in itertools.count(first):
        path = folder / f"{number:04d}.jsonl"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("numbers do not end")


def save(
    path: Path,
    *,
    model: str,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    answers: Sequence[Answer],
) -> None:
    head = {"time_s": time.time(), "model": model, "metrics": dict(metrics), "config": dict(config)}
    lines = [head, *(asdict(answer) for answer in answers)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(line, default=str) + "\n" for line in lines))


def load(path: Path) -> Evaluation:
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Evaluation(path=path, answers=[Answer(**row) for row in rows], **head)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is no evaluation that `rill eval` has written: {error}") from error


def newest(run: Run) -> Evaluation | None:
    """None: it was never evaluated by `rill eval`."""
    files = (run.path / FOLDER).glob("*.jsonl")
    found = sorted(path for path in files if path.stem.isdigit() and path.stat().st_size)
    return load(found[-1]) if found else None
