"""What the model said, read back from a run's `rollouts/*.jsonl` (written by rill.telemetry.rollout_log).

Called by the report, by `rill runs rollouts` and by the summary at the end of a run; works while the run goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rill.telemetry.jsonl import read_lines
from rill.telemetry.run import Run


class SampleRecord(msgspec.Struct):
    tokens: list[str] = []
    sampled: list[int] = []
    reward: float | None = None
    stop: str = ""
    error: str | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    tags: list[str] = []


class GroupRecord(msgspec.Struct):
    """What is read of a line of a rollout log; what it holds besides goes to the dashboard as it is."""

    version: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    group: str
    samples: Annotated[list[SampleRecord], msgspec.Meta(max_length=(1 << 16) - 1)]
    prompt_id: str = ""
    task: str = ""
    dropped: str | None = None
    tags: list[str] = []
    evaluates: str = ""
    """The evaluation set it is of; empty: training."""


LINE_CHARACTERS = 100
"""Of a sample written as one line; longer ones lose their middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One sample as a person reads it."""

    prompt: str
    response: str
    reward: float
    version: int
    """The newest that wrote a token of its group."""
    error: str | None

    @property
    def text(self) -> str:
        return self.prompt + self.response

    def line(self, width: int = LINE_CHARACTERS) -> str:
        text = " ".join(f"{self.prompt}▸{self.response}".split())
        if len(text) > width:
            text = f"{text[: width // 2]} … {text[-(width // 2) :]}"
        return f"{text}   reward {self.reward:.2f}"


def read_rollouts(run: Run) -> list[dict[str, Any]]:
    """The groups that training recorded, by version and then by group, as they stand in the files."""
    groups = [
        record
        for path in sorted(run.rollouts_dir.glob("*.jsonl"))
        for record in read_lines(path)
        if "evaluates" not in record and _is_group(record)
    ]
    return sorted(groups, key=lambda group: (group["version"], group["group"]))


def _is_group(record: dict[str, Any]) -> bool:
    try:
        msgspec.convert(record, GroupRecord)
    except msgspec.ValidationError:
        return False
    return True


def samples_of(group: dict[str, Any]) -> list[Said]:
    return [_said(sample, group["version"]) for sample in group["samples"]]


def then_and_now(run: Run) -> list[Said]:
    """A typical sample of the first and of the last recorded version; empty when fewer than two groups were recorded.

    Typical is the sample with the median reward: the best would flatter, the worst would slander.
    """
    groups = [group for group in read_rollouts(run) if group["samples"]]
    if len(groups) < 2:
        return []
    ends = (groups[0]["version"], groups[-1]["version"])
    return [
        _typical([said for group in groups if group["version"] == end for said in samples_of(group)])
        for end in ends
    ]


def latest_error(run: Run) -> str:
    """Why the newest recorded sample with an error failed; empty when none did."""
    errors = [said.error for group in read_rollouts(run) for said in samples_of(group) if said.error]
    return errors[-1] if errors else ""


def newest_failure(run: Run) -> str:
    """Why the answers of the newest recorded group failed, if all of them did: there was nothing to learn from."""
    groups = sorted(read_rollouts(run), key=lambda group: str(group["group"]))
    errors = [said.error for said in samples_of(groups[-1])] if groups else []
    return errors[-1] or "" if errors and all(errors) else ""


def _typical(samples: list[Said]) -> Said:
    return sorted(samples, key=lambda said: said.reward)[len(samples) // 2]


def _said(sample: dict[str, Any], version: int) -> Said:
    tokens, sampled = sample.get("tokens", ()), sample.get("sampled", ())
    opening = next((i for i, is_sampled in enumerate(sampled) if is_sampled), len(tokens))
    return Said(
        prompt="".join(tokens[:opening]),
        response="".join(tokens[opening:]),
        reward=math.nan if (reward := sample.get("reward")) is None else reward,
        version=version,
        error=sample.get("error"),
    )
