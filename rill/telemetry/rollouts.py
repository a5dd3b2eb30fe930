"""What the model said, read back from a run's `rollouts/*.jsonl` (written by rill.telemetry.rollout_log).

Called by the report, by `rill runs rollouts` and by the summary at the end of a run; works while the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def each_group(run: Run) -> Iterator[GroupRecord]:
    """The groups that training recorded, as they stand in the files: all of a long run would not fit into memory."""
    for path in sorted(run.rollouts_dir.glob("*.jsonl")):
        for record in read_records(path, GroupRecord):
            if not record.evaluates:
                yield record


def in_order(group: GroupRecord) -> tuple[int, str]:
    """By version and then by group."""
    return group.version, group.group


def then_and_now(run: Run) -> list[SampleRecord]:
    """A typical sample of the first and of the last recorded version; empty when fewer than two groups were recorded.

    Typical is the sample with the median reward: the best would flatter, the worst would slander.
    """
    ends: dict[int, list[SampleRecord]] = {}
    num_groups = 0
    for group in each_group(run):
        if group.samples:
            num_groups += 1
            ends.setdefault(group.version, []).extend(group.samples)
            for between in sorted(ends)[1:-1]:
                del ends[between]
    if num_groups < 2:
        return []
    said = (ends[min(ends)], ends[max(ends)])
    return [sorted(samples, key=lambda sample: sample.score)[len(samples) // 2] for samples in said]


def latest_error(run: Run) -> str:
    """Why the newest recorded sample with an error failed; empty when none did."""
    failed = (group for group in each_group(run) if any(sample.error for sample in group.samples))
    newest = max(failed, key=in_order, default=None)
    errors = [sample.error for sample in newest.samples if sample.error] if newest else []
    return errors[-1] if errors else ""


def newest_failure(run: Run) -> str:
    """Why the answers of the newest recorded group failed, if all of them did: there was nothing to learn from."""
    newest = max(each_group(run), key=lambda group: group.group, default=None)
    errors = [sample.error for sample in newest.samples] if newest else []
    return errors[-1] or "" if errors and all(errors) else ""
