"""More groups than a batch needs: the slowest are stopped with their tokens and go on under newer weights."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from rill.runtime.cluster import Cluster
from rill.types import NOT_SAMPLED
from rill.workflows.config import LoopConfig
from tests.workflows.scene import Scene
from tests.workflows.test_conservation import check_once

LONG_TAILED = {"tick_s": 0.004, "max_delay_ticks": 40}


def check_parts(scene: Scene) -> int:
    """Every trained answer is the parts that the engines said, one after the other, and every part is in an answer.
    Returns how many answers have several parts."""
    said = {name: sorted(parts, key=lambda part: part["at"]) for name, parts in scene.said().items()}
    num_continued = 0
    trained = set()
    for batch in scene.trained():
        for sample in batch.samples:
            t = sample.trajectory
            parts = said[t.episode_id]
            sampled = t.versions != NOT_SAMPLED
            assert t.token_ids[sampled].tolist() == [x for part in parts for x in part["tokens"]]
            assert t.versions[sampled].tolist() == [x for part in parts for x in part["versions"]]
            logprobs = np.array([x for part in parts for x in part["logprobs"]], np.float32)
            assert np.array_equal(t.logprobs[sampled], logprobs)
            assert np.all(np.diff(t.versions[sampled]) >= 0), "a version never goes down"
            lengths = [part["num_given"] for part in parts]
            num_prompt = int(np.count_nonzero(~sampled))
            before = np.cumsum([0, *(len(part["tokens"]) for part in parts)])[:-1]
            assert lengths == (num_prompt + before).tolist(), "each part was given what was said before it"
            assert np.count_nonzero(sampled) <= scene.max_new_tokens
            num_continued += sum(len(part["tokens"]) > 0 for part in parts) > 1
            trained.add(t.episode_id)
    left_over = {name.partition("/")[0] for name in set(said) - trained}
    assert len(left_over) == scene.counts()["dropped"], (
        "something was said that was neither trained on nor dropped"
    )
    return num_continued


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_settings_every_token_reaches_the_loss_once(
    tmp_path: Path, cluster: Cluster, seed: int
) -> None:
    rng = random.Random(seed)
    max_lag = rng.choice([0, 0, 1, 2])
    order = rng.choice(["completion", "admission"])
    spare = rng.choice([0.0, 0.5, 1.0]) if max_lag == 0 and order == "completion" else 0.0
    steps, groups, group_size = rng.randint(3, 6), rng.randint(1, 5), rng.randint(2, 4)
    scene = Scene(
        tmp_path,
        cluster,
        name=f"any-{seed}",
        engines=rng.choice(["0", "0-1"]),
        env_workers=rng.choice([0, 0, 1, 2]),
        granularity=rng.choice([0, 1, 2]),
        steps=steps,
        prompts_per_step=groups,
        group_size=group_size,
        max_new_tokens=rng.randint(1, 60),
        drop_equal=rng.random() < 0.5,
        interrupt=rng.random() < 0.7,
        max_lag=max_lag,
        order=order,
        overprovision=spare,
        max_resumes=rng.randint(1, 3),
        engine={"tick_s": 0.003, "max_delay_ticks": rng.randint(0, 40)},
    )
    scene.run()
    check_once(scene, steps, groups)
    check_parts(scene)
    lags = [report.metrics.get("lag/max", 0.0) for report in scene.reports]
    if order == "admission" or max_lag == 0:
        assert max(lags) <= scene.loop.config.largest_lag


@pytest.mark.parametrize(
    ("engines", "env_workers"),
    [
        pytest.param("0", 0, id="one engine"),
        pytest.param("0-1", 0, id="two engines", marks=pytest.mark.slow),
        pytest.param("0-1", 2, id="environments apart", marks=pytest.mark.slow),
    ],
)
def test_slow_groups_are_stopped_and_no_token_is_lost(
    tmp_path: Path, cluster: Cluster, engines: str, env_workers: int
) -> None:
    scene = Scene(
        tmp_path,
        cluster,
        name=f"spare-{len(engines)}-{env_workers}",
        engines=engines,
        env_workers=env_workers,
        steps=6,
        prompts_per_step=4,
        max_new_tokens=60,
        overprovision=0.5,
        engine=LONG_TAILED,
    )
    scene.run()
    check_once(scene, 6, 4)
    assert check_parts(scene) > 0, "the scene was meant to cut answers in two"
    assert sum(report.metrics.get("groups/resumed", 0.0) for report in scene.reports) > 0
    assert max(report.metrics.get("lag/max", 0.0) for report in scene.reports) >= 1


def test_a_run_that_stops_goes_on_with_what_was_stopped(tmp_path: Path, cluster: Cluster) -> None:
    settings = {"steps": 5, "prompts_per_step": 3, "max_new_tokens": 60, "overprovision": 1.0}
    scene = Scene(tmp_path, cluster, name="stopped", engine=LONG_TAILED, **settings)  # type: ignore[arg-type]
    scene.loop.config = scene.loop.config.model_copy(update={"steps": 2})
    scene.run()
    kept = sum(len(part["tokens"]) for parts in scene.said().values() for part in parts)
    scene.close()
    again = Scene(
        tmp_path, cluster, name="stopped-again", engine=LONG_TAILED, resumed=scene, **settings  # type: ignore[arg-type]
    )  # fmt: skip
    again.run()
    check_once(again, 5, 3)
    assert kept > 0 and check_parts(again) > 0


def test_it_is_refused_where_engines_run_ahead_anyway() -> None:
    with pytest.raises(ValueError, match="for max_lag = 0"):
        LoopConfig(overprovision=0.5, max_lag=1)
