"""What the model said, for people: `rollouts/<process>.jsonl` in the run folder, read by the rollout viewer.

A record is one group, with the text and the token-level fields of each sample. Only some groups of a step are kept
(see RolloutConfig.log_groups): this is a window on the run, not its record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rill.telemetry.jsonl import LineFile, encode_line
from rill.types import NOT_SAMPLED, Group, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLLOUTS_FOLDER = "rollouts"
MAX_LOGGED_TOKENS = 4096


class RolloutLog:
    def __init__(
        self, run_dir: Path, process: str, tokenizer: PreTrainedTokenizerBase, max_groups: int
    ) -> None:
        self._file = LineFile(run_dir / ROLLOUTS_FOLDER / f"{process}.jsonl")
        self._tokenizer = tokenizer
        self._max_groups = max_groups
        self._version = -1
        self._num_logged = 0

    def write(self, group: Group, *, dropped: str | None) -> None:
        version = max((int(t.versions.max(initial=-1)) for t in group.trajectories), default=-1)
        if version != self._version:
            self._version, self._num_logged = version, 0
        if self._num_logged >= self._max_groups:
            return
        self._num_logged += 1
        record = {
            "version": version,
            "group": group.id,
            "prompt_id": group.prompt.id,
            "task": group.prompt.task,
            "answer": group.prompt.answer,
            "dropped": dropped,
            "samples": [self._sample(trajectory) for trajectory in group.trajectories],
        }
        self._file.write(encode_line(record))

    def close(self) -> None:
        self._file.close()

    def _sample(self, trajectory: Trajectory) -> dict[str, Any]:
        ids = trajectory.token_ids[:MAX_LOGGED_TOKENS].tolist()
        sampled = trajectory.versions[:MAX_LOGGED_TOKENS] != NOT_SAMPLED
        return {
            "id": trajectory.id,
            "reward": trajectory.reward,
            "parts": dict(trajectory.reward_parts),
            "stop": trajectory.stop_reason.value,
            "error": trajectory.error,
            "tokens": [self._tokenizer.decode([token]) for token in ids],
            "logprobs": [round(float(x), 3) for x in trajectory.logprobs[:MAX_LOGGED_TOKENS]],
            "sampled": sampled.astype(int).tolist(),
            "versions": trajectory.versions[:MAX_LOGGED_TOKENS].tolist(),
            "num_tokens": trajectory.num_tokens,
        }
