"""Films of a robot's held-out episodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rill.telemetry.jsonl import read_lines
from rill.telemetry.rollout_log import MEDIA_FOLDER, ROLLOUTS_FOLDER
from rill.types import Prompt
from rill.workers.records import Task
from rill.workers.robots.config import RobotRolloutConfig
from rill.workers.robots.outcome import FilmLog


def test_several_episodes_from_one_state_have_a_film_each(tmp_path: Path) -> None:
    task = Task(index=1, prompt=Prompt(id="left/1", messages=()), num_samples=2, purpose="held_out")
    films = FilmLog(RobotRolloutConfig(), tmp_path, "env-0")
    for number in range(2):
        recording: Any = SimpleNamespace(pictures=[np.full((16, 16, 3), 200 * number, np.uint8)])
        episode: Any = SimpleNamespace(
            id=f"{task.id}/{number}",
            error=None,
            success=True,
            truncated=False,
            num_actions=3,
            num_chunks=1,
            versions_C=np.array([4]),
            logprobs_CJ=np.zeros((1, 2)),
            final=SimpleNamespace(instruction="go left"),
        )
        films.add(task, recording, episode)
    films.close()
    lines = list(read_lines(tmp_path / ROLLOUTS_FOLDER / "env-0.jsonl"))
    paths = [line["samples"][0]["media"][0]["path"] for line in lines]
    assert len({(tmp_path / MEDIA_FOLDER / path).read_bytes() for path in paths}) == 2
