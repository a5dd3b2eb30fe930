"""What becomes of a group of a robot's episodes, in the process where they were played; and films of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rill.algorithms.embodied import EmbodiedAlgorithmConfig, judge
from rill.envs.robots.film import gif
from rill.envs.robots.recording import Recording
from rill.telemetry.jsonl import LineFile, encode_line
from rill.telemetry.rollout_log import MEDIA_FOLDER, ROLLOUTS_FOLDER
from rill.types import EmbodiedTrajectory, PolicyVersion
from rill.workers.records import TRAIN, Outcome, Task
from rill.workers.robots.config import RobotRolloutConfig


def finished(
    algorithm: EmbodiedAlgorithmConfig,
    task: Task,
    episodes: Sequence[EmbodiedTrajectory],
    simulating: float,
) -> tuple[Outcome, list[EmbodiedTrajectory]]:
    """The outcome, and the episodes that are trained on. Failed ones are counted and left out of everything else."""
    whole = sorted((e for e in episodes if e.error is None), key=lambda episode: episode.id)
    if task.purpose != TRAIN:
        rewards = tuple(float("nan") if e.error is not None else float(e.success) for e in episodes)
        error = next((e.error for e in episodes if e.error is not None), None)
        return Outcome(index=task.index, purpose=task.purpose, rewards=rewards, error=error), []
    verdict = judge(algorithm, [episode.success for episode in whole])
    kept = whole if verdict.keep else []
    metrics = group_metrics(episodes, whole) | {"rollout/simulating": simulating}
    versions = [int(episode.versions_C.min()) for episode in whole if episode.num_chunks]
    outcome = Outcome(
        index=task.index,
        purpose=task.purpose,
        lengths=tuple(episode.num_tokens for episode in kept),
        dropped=None if verdict.keep else str(verdict.reason),
        rewards=tuple(episode.reward for episode in whole),
        oldest_version=PolicyVersion(min(versions)) if versions else None,
        metrics=metrics,
    )
    return outcome, kept


def group_metrics(
    episodes: Sequence[EmbodiedTrajectory], whole: Sequence[EmbodiedTrajectory]
) -> dict[str, float]:
    metrics = {"rollout/errors": 1.0 - len(whole) / len(episodes)}
    if not whole:
        return metrics
    successes = [float(episode.success) for episode in whole]
    metrics |= {
        "reward/mean": float(np.mean([episode.reward for episode in whole])),
        "success/mean": float(np.mean(successes)),
        "length/actions": float(np.mean([episode.num_actions for episode in whole])),
        "length/truncated": float(np.mean([episode.truncated for episode in whole])),
        "actions/clipped": float(np.mean([episode.clipped for episode in whole])),
    }
    if len(episodes) > 1:
        metrics["groups/without_signal"] = float(np.std(successes) < 1e-6)
    return metrics


class FilmLog:
    """The first held-out episodes of each evaluation, as GIFs in the run folder and in the rollout viewer."""

    def __init__(self, config: RobotRolloutConfig, run_dir: Path, process: str) -> None:
        self._config = config
        self._run = run_dir
        self._file = LineFile(self._run / ROLLOUTS_FOLDER / f"{process}.jsonl")

    def close(self) -> None:
        self._file.close()

    def size_of(self, task: Task) -> int:
        """Pixels of the pictures to take of a task's episodes; 0: none."""
        is_filmed = task.purpose != TRAIN and task.index < self._config.films
        return self._config.film_size if is_filmed else 0

    def add(self, task: Task, recording: Recording, episode: EmbodiedTrajectory) -> None:
        """A film where pictures were taken; a line without one for an episode that failed."""
        if not recording.pictures and episode.error is None:
            return
        version = int(episode.versions_C.max(initial=-1))
        said = episode.final.instruction
        media = []
        if recording.pictures:
            nth = f"-{episode.id.rpartition('/')[2]}" if task.num_samples > 1 else ""
            name = f"{task.purpose}-{task.index:03d}{nth}-version-{version:05d}.gif"
            folder = self._run / MEDIA_FOLDER
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(gif(recording.pictures, said, success=episode.success))
            media.append({"path": name, "kind": "image", "caption": f"{said} (version {version})"})
        self._file.write(encode_line(_record(task, episode, version, media)))


def _record(
    task: Task, episode: EmbodiedTrajectory, version: int, media: list[dict[str, str]]
) -> dict[str, object]:
    """As rill.telemetry.rollout_log writes them, an instruction and what was done for text."""
    how = "did it" if episode.success else "did not do it"
    told = (
        f" {how} in {episode.num_actions} actions" if episode.error is None else f" failed: {episode.error}"
    )
    tokens = [episode.final.instruction or episode.start.name, told]
    return {
        "version": version,
        "group": f"{task.id}@{version}",
        "prompt_id": task.prompt.id,
        "task": task.prompt.task,
        "answer": None,
        "dropped": None,
        "tags": [],
        "samples": [
            {
                "id": episode.id,
                "reward": float(episode.success),
                "parts": {},
                "stop": "length" if episode.truncated else "eos",
                "error": episode.error,
                "tokens": tokens,
                "logprobs": [0.0, float(episode.logprobs_CJ.mean()) if episode.num_chunks else 0.0],
                "sampled": [0, 1],
                "versions": [-1, version],
                "mask": [0, 1],
                "turns": [],
                "num_tokens": episode.num_actions,
                "media": media,
            }
        ],
    }
