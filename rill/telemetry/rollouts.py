"""What the model said, read back from a run's `rollouts/*.jsonl` (written by rill.telemetry.rollout_log).

Called by the report, by `rill runs rollouts` and by the summary at the end of a run; works while the run goes on.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from rill.telemetry.jsonl import read_records
from rill.telemetry.run import Run

LINE_CHARACTERS = 100
"""Of a sample written as one line; longer ones lose their middle."""


class SampleRecord(msgspec.Struct):
    tokens: list[str] = []
    sampled: list[int] = []
    reward: float | None = None
    stop: str = ""
    error: str | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    tags: list[str] = []

    @property
    def prompt(self) -> str:
        return "".join(self.tokens[: self._opening()])

    @property
    def response(self) -> str:
        """From the first token that a policy made."""
        return "".join(self.tokens[self._opening() :])

    @property
    def score(self) -> float:
        return math.nan if self.reward is None else self.reward

    def line(self, width: int = LINE_CHARACTERS) -> str:
        text = " ".join(f"{self.prompt}▸{self.response}".split())
        if len(text) > width:
            text = f"{text[: width // 2]} … {text[-(width // 2) :]}"
        return f"{text}   reward {self.score:.2f}"

    def _opening(self) -> int:
        return next((i for i, is_sampled in enumerate(self.sampled) if is_sampled), len(self.tokens))


class GroupRecord(msgspec.Struct):
    """What is read of a line of a rollout log; what it holds besides goes to the dashboard as it is."""

    version: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    """The newest that wrote a token of it."""
    group: str
    samples: Annotated[list[SampleRecord], msgspec.Meta(max_length=(1 << 16) - 1)]
    prompt_id: str = ""
    task: str = ""
    answer: Any = None
    dropped: str | None = None
    tags: list[str] = []
    evaluates: str = ""
    """The evaluation set it is of; empty: training."""


def read_rollouts(run: Run) -> list[GroupRecord]:
    """The groups that training recorded, by version and then by group."""
    groups = [
        record
        for path in sorted(run.rollouts_dir.glob("*.jsonl"))
        for record in read_records(path, GroupRecord)
        if not record.evaluates
    ]
    return sorted(groups, key=lambda group: (group.version, group.group))


def then_and_now(run: Run) -> list[SampleRecord]:
    """A typical sample of the first and of the last recorded version; empty when fewer than two groups were recorded.

    Typical is the sample with the median reward: the best would flatter, the worst would slander.
    """
    groups = [group for group in read_rollouts(run) if group.samples]
    if len(groups) < 2:
        return []
    ends = (groups[0].version, groups[-1].version)
    said = [[sample for group in groups if group.version == end for sample in group.samples] for end in ends]
    return [sorted(samples, key=lambda sample: sample.score)[len(samples) // 2] for samples in said]


def latest_error(run: Run) -> str:
    """Why the newest recorded sample with an error failed; empty when none did."""
    errors = [sample.error for group in read_rollouts(run) for sample in group.samples if sample.error]
    return errors[-1] if errors else ""


def newest_failure(run: Run) -> str:
    """Why the answers of the newest recorded group failed, if all of them did: there was nothing to learn from."""
    groups = sorted(read_rollouts(run), key=lambda group: group.group)
    errors = [sample.error for sample in groups[-1].samples] if groups else []
    return errors[-1] or "" if errors and all(errors) else ""
