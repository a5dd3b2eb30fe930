"""A run that is killed while engines are ahead: nothing that was said is lost or said twice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from rill.errors import RunError
from rill.journal.reader import LoggedSequence, LogReader
from rill.runtime.cluster import Cluster
from rill.types import NOT_SAMPLED
from rill.workers.records import group_id
from rill.workflows.flow import Flow
from tests.workflows.scene import Scene
from tests.workflows.test_conservation import check_once

STEPS, GROUPS, SAVED_AT = 5, 3, 2
LONG_TAILED = {"tick_s": 0.015, "max_delay_ticks": 40}
START_S = 60.0


def killed(
    folder: Path, cluster: Cluster, name: str, settings: Mapping[str, object], step: int
) -> tuple[Scene, dict[str, LoggedSequence]]:
    """A run that ended when it had taken `step` steps and its engine was ahead, and what its log holds. However slow
    its machine is: answers beyond those of one step more do not end."""
    engine = LONG_TAILED | {"stands_from": group_id((step + 1) * GROUPS)}
    scene = Scene(folder, cluster, name=name, **settings | {"engine": engine})  # type: ignore[arg-type]

    def until_killed(flow: Flow) -> None:
        if scene.loop.step < step:
            return scene.step(flow)
        deadline_s = time.monotonic() + START_S
        while all(sequence.is_finished for sequence in logged_by(scene).values()):
            assert time.monotonic() < deadline_s, "engines were meant to be ahead"
            time.sleep(0.02)
        raise RunError("killed by the test")

    scene.loop._write_step = until_killed
    with pytest.raises(RunError, match="killed by the test"):
        scene.run()
    scene.close()
    return scene, logged_by(scene)


def logged_by(scene: Scene) -> dict[str, LoggedSequence]:
    reader = LogReader(scene.folder)
    reader.read_all()
    return dict(reader.sequences())


@pytest.mark.parametrize(
    ("order", "killed_at"),
    [("completion", SAVED_AT + 1), ("admission", 1)],
    ids=["a step after its checkpoint", "before its first checkpoint"],
)
def test_a_killed_run_samples_nothing_twice_and_trains_on_the_batches_that_it_had_chosen(
    tmp_path: Path, cluster: Cluster, order: str, killed_at: int
) -> None:
    settings = {
        "steps": STEPS,
        "prompts_per_step": GROUPS,
        "max_new_tokens": 60,
        "max_lag": 2,
        "order": order,
        "checkpoint_every": SAVED_AT,
        "engine": LONG_TAILED,
    }
    scene, logged = killed(tmp_path, cluster, order, settings, killed_at)
    num_said = {episode: len(parts) for episode, parts in scene.said().items()}
    before = {batch.version: batch for batch in scene.trained()}
    assert len(before) == killed_at
    assert any(not sequence.is_finished for sequence in logged.values())
    for path in scene.folder.glob("step-*.pickle"):
        if int(path.stem.removeprefix("step-")) >= (SAVED_AT if killed_at > SAVED_AT else 0):
            path.rename(path.with_suffix(".before"))  # these steps are taken again

    again = Scene(tmp_path, cluster, name=f"{order}-again", resumed=scene, **settings)  # type: ignore[arg-type]
    again.run()

    check_once(again, STEPS, GROUPS)
    trained = {s.trajectory.episode_id: s for batch in again.trained() for s in batch.samples}
    for batch in again.trained():
        if (same := before.get(batch.version)) is not None:
            assert batch.indices == same.indices, "a batch that was chosen is chosen again"
            for now, then in zip(batch.samples, same.samples, strict=True):
                assert np.array_equal(now.trajectory.token_ids, then.trajectory.token_ids)
                assert np.array_equal(now.trajectory.versions, then.trajectory.versions)
                assert np.array_equal(now.advantages, then.advantages)
    for request, sequence in logged.items():
        episode = request.partition("#")[0]
        t = trained[episode].trajectory
        said = t.token_ids[t.versions != NOT_SAMPLED]
        assert np.array_equal(said[: len(sequence.token_ids)], sequence.token_ids), (
            "goes on behind its tokens"
        )
        if sequence.is_finished:
            assert len(again.said()[episode]) == num_said[episode], "a finished answer was asked for again"
