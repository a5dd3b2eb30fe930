"""What the model said, for people: `rollouts/<process>.jsonl` in the run folder, read by the dashboard and `rill runs`.

A record is one group, with the text and the token-level fields of each sample. Only some groups of a step are kept
(see RolloutConfig.log_groups): this is a window on the run, not its record. What the trainer computes of the same
tokens later lies in `trained/<process>.jsonl`, a record a sample. docs/telemetry.md lists the fields.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.telemetry.jsonl import LineFile, encode_line
from rill.types import NOT_SAMPLED, Floats, Group, Picture, Sample, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLLOUTS_FOLDER, TRAINED_FOLDER, MEDIA_FOLDER = "rollouts", "trained", "media"
MAX_LOGGED_TOKENS = 4096
DIGITS = 3


class RolloutLog:
    def __init__(
        self, run_dir: Path, process: str, tokenizer: PreTrainedTokenizerBase, max_groups: int
    ) -> None:
        self._file = LineFile(run_dir / ROLLOUTS_FOLDER / f"{process}.jsonl")
        self._media = run_dir / MEDIA_FOLDER
        self._tokenizer = tokenizer
        self._max_groups = max_groups
        self._num_logged: Counter[int] = Counter()
        """Groups by version: where engines run ahead those of two versions come mixed."""

    def write(
        self, group: Group, *, dropped: str | None, trained: Mapping[str, Sample] | None = None
    ) -> bool:
        """Whether it was kept. `trained`: what is known of the group's samples already, by trajectory id."""
        version = _version(group)
        if self._num_logged[version] >= self._max_groups:
            return False
        self._num_logged[version] += 1
        self._file.write(encode_line(self._record(group, group.id, dropped, trained or {})))
        return True

    def write_evaluation(self, group: Group, place: int, name: str, version: int | None = None) -> None:
        """Answers to prompt number `place` of an evaluation set: those to its first prompts are kept every time.
        `version`: of the weights, where the engine that answered does not count them."""
        version = _version(group) if version is None else version
        if place < self._max_groups:
            record = self._record(group, f"{group.id}@{version}", None, {})
            self._file.write(encode_line(record | {"version": version, "evaluates": name}))

    def _record(
        self, group: Group, name: str, dropped: str | None, trained: Mapping[str, Sample]
    ) -> dict[str, Any]:
        return {
            "version": _version(group),
            "group": name,
            "prompt_id": group.prompt.id,
            "task": group.prompt.task,
            "answer": group.prompt.answer,
            "dropped": dropped,
            "tags": [str(tag) for tag in group.prompt.metadata.get("tags", ())],
            "samples": [self._sample(t, trained.get(t.id)) for t in group.trajectories],
        }

    def close(self) -> None:
        self._file.close()

    def _sample(self, trajectory: Trajectory, trained: Sample | None) -> dict[str, Any]:
        ids = trajectory.token_ids[:MAX_LOGGED_TOKENS].tolist()
        sampled = trajectory.versions[:MAX_LOGGED_TOKENS] != NOT_SAMPLED
        record = {
            "id": trajectory.id,
            "reward": trajectory.reward,
            "parts": dict(trajectory.reward_parts),
            "stop": trajectory.stop_reason.value,
            "error": trajectory.error,
            "tokens": [self._tokenizer.decode([token]) for token in ids],
            "logprobs": _rounded(trajectory.logprobs),
            "sampled": sampled.astype(int).tolist(),
            "versions": trajectory.versions[:MAX_LOGGED_TOKENS].tolist(),
            "mask": trajectory.loss_mask[:MAX_LOGGED_TOKENS].astype(int).tolist(),
            "turns": [{"role": t.role, "start": t.start, "end": t.end} for t in trajectory.turns],
            "num_tokens": trajectory.num_tokens,
        }
        media = [*trajectory.metadata.get("media", ()), *map(self._kept, trajectory.pictures)]
        if media:
            record["media"] = media
        if trained is not None:
            record["advantages"] = _rounded(trained.advantages)
            if trained.old_logprobs is not None:
                record["trainer_logprobs"] = _rounded(trained.old_logprobs)
        return record

    def _kept(self, picture: Picture) -> dict[str, str]:
        """The picture lies in the run folder once, whoever shows it."""
        path = self._media / picture.file_name
        if not path.exists():
            self._media.mkdir(exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_bytes(picture.data)
            partial.rename(path)
        return {"path": path.name, "kind": "image", "caption": f"tokens {picture.start} to {picture.end}"}


class TrainedLog:
    """By the trainer, of the samples that are logged. Its figures are of the first pass over them in a step."""

    def __init__(self, run_dir: Path, process: str) -> None:
        self._file = LineFile(run_dir / TRAINED_FOLDER / f"{process}.jsonl")

    def write(self, sample: Sample, logprobs: Floats, entropies: Floats) -> None:
        """Per token; what a token that is not trained on has is left out."""
        mask = sample.trajectory.loss_mask.tolist()
        columns = {"trainer_logprobs": logprobs, "entropies": entropies, "advantages": sample.advantages}
        record: dict[str, Any] = {"id": sample.id}
        for name, values in columns.items():
            record[name] = [x if is_trained else None for x, is_trained in zip(_rounded(values), mask)]
        self._file.write(encode_line(record))

    def close(self) -> None:
        self._file.close()


def _version(group: Group) -> int:
    """The newest that wrote a token of it."""
    return max((int(t.versions.max(initial=-1)) for t in group.trajectories), default=-1)


def _rounded(values: Floats) -> list[float]:
    rounded: list[float] = np.round(values[:MAX_LOGGED_TOKENS].astype(np.float64), DIGITS).tolist()
    return rounded
