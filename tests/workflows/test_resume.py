"""A run that is killed while engines are ahead: what its checkpoint holds is neither lost nor said twice."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from rill.errors import RunError
from rill.journal.checkpoints import whole_checkpoints
from rill.runtime.cluster import Cluster
from rill.types import NOT_SAMPLED, Sample
from rill.workflows.controller import GROUPS_FILE
from rill.workflows.flow import Flow
from rill.workflows.staleness import Entry
from tests.workflows.scene import Scene
from tests.workflows.test_conservation import check_once

STEPS, GROUPS, SAVED_AT = 5, 3, 2
LONG_TAILED = {"tick_s": 0.015, "max_delay_ticks": 40}


def killed_after_its_checkpoint(
    folder: Path, cluster: Cluster, name: str, settings: Mapping[str, object]
) -> Scene:
    scene = Scene(folder, cluster, name=name, **settings)  # type: ignore[arg-type]

    def until_killed(flow: Flow) -> None:
        if scene.loop.step == SAVED_AT:
            raise RunError("killed by the test")
        scene.step(flow)

    scene.loop._write_step = until_killed
    with pytest.raises(RunError, match="killed by the test"):
        scene.run()
    scene.close()
    return scene


def held(scene: Scene) -> tuple[list[Entry], dict[str, Sample]]:
    newest = whole_checkpoints(scene.run_folder)[-1]
    untrained, samples = pickle.loads((newest / "controller" / GROUPS_FILE).read_bytes())
    return untrained, samples


def sampled(sample: Sample) -> list[int]:
    trajectory = sample.trajectory
    tokens: list[int] = trajectory.token_ids[trajectory.versions != NOT_SAMPLED].tolist()
    return tokens


@pytest.mark.parametrize("keep_unfinished", [True, False], ids=["engines stopped", "engines not stopped"])
def test_finished_groups_are_trained_on_and_not_said_again(
    tmp_path: Path, cluster: Cluster, keep_unfinished: bool
) -> None:
    settings = {
        "steps": STEPS,
        "prompts_per_step": GROUPS,
        "max_new_tokens": 60,
        "max_lag": 2,
        "checkpoint_every": SAVED_AT,
        "keep_unfinished": keep_unfinished,
        "engine": LONG_TAILED,
    }
    name = f"ahead-{keep_unfinished}"
    scene = killed_after_its_checkpoint(tmp_path, cluster, name, settings)
    untrained, samples = held(scene)
    num_said = {request: len(parts) for request, parts in scene.said().items()}
    assert untrained, "the engines were meant to be ahead"
    again = Scene(tmp_path, cluster, name=f"{name}-again", resumed=scene, **settings)  # type: ignore[arg-type]
    again.run()

    check_once(again, STEPS, GROUPS)
    trained = {s.trajectory.episode_id: s for batch in again.trained() for s in batch.samples}
    for sample in samples.values():
        found = trained[sample.trajectory.episode_id]
        assert np.array_equal(found.trajectory.token_ids, sample.trajectory.token_ids)
        assert np.array_equal(found.trajectory.versions, sample.trajectory.versions)
        assert np.array_equal(found.advantages, sample.advantages)
        episode = sample.trajectory.episode_id
        assert len(again.said()[episode]) == num_said[episode], "a finished answer was asked for again"
    begun = [entry.task for entry in untrained if entry.outcome is None]
    continued = [answer for task in begun for answer in task.progress.answers.values()]
    assert bool(continued) == keep_unfinished, (
        "unfinished answers are held where engines were stopped, and only there"
    )
    for task in begun:
        for request, answer in task.progress.answers.items():
            before = answer.token_ids.tolist()
            whole = sampled(trained[request.partition("#")[0]])
            assert whole[: len(before)] == before, "an unfinished answer goes on behind its tokens"
    again.close()


def test_lengths_are_not_biased_by_a_kill(tmp_path: Path, cluster: Cluster) -> None:
    """Every group that was begun is trained on, the long ones too: none is left out for being unfinished."""
    settings = {
        "steps": STEPS,
        "prompts_per_step": GROUPS,
        "max_new_tokens": 60,
        "max_lag": 2,
        "order": "admission",
        "checkpoint_every": SAVED_AT,
        "engine": LONG_TAILED,
    }
    scene = killed_after_its_checkpoint(tmp_path, cluster, "unbiased", settings)
    untrained, _ = held(scene)
    begun = {entry.task.index for entry in untrained}
    again = Scene(tmp_path, cluster, name="unbiased-again", resumed=scene, **settings)  # type: ignore[arg-type]
    again.run()
    trained = [index for batch in again.trained() for index in batch.indices]
    assert begun <= set(trained)
    assert sorted(trained) == list(range(STEPS * GROUPS)), "the groups of an undisturbed run, each once"
    again.close()
