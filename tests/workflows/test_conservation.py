"""Through the whole loop: what the engine said is what the loss gets, once, whatever the order and the lag."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rill.algorithms import Algorithm
from rill.inference.policy import PolicyClient
from rill.runtime.cluster import Cluster
from rill.types import NOT_SAMPLED, Sample
from rill.workers.records import group_id
from tests.workflows.scene import SEED, Scene, TrainedBatch
from tests.workflows.scripted_engine import script


def check_conserved(scene: Scene) -> None:
    """Tokens, masks, versions, rewards and advantages of everything that was trained on."""
    said = scene.said()
    seeds = PolicyClient(None, seed=SEED, decode=str)  # type: ignore[arg-type]
    for batch in scene.trained():
        groups: dict[str, list[Sample]] = {}
        for sample in batch.samples:
            t = sample.trajectory
            groups.setdefault(t.group_id, []).append(sample)
            request = said[t.episode_id][0]["id"].partition("@")[0]
            tokens, logprobs = script(seeds.seed_of(request), scene.max_new_tokens)
            sampled = t.versions != NOT_SAMPLED
            assert np.array_equal(t.token_ids[sampled], tokens)
            assert np.array_equal(t.logprobs[sampled], logprobs)
            assert np.array_equal(t.loss_mask, sampled), "the prompt is not trained on, every answer token is"
            versions = t.versions[
                sampled
            ].tolist()  # of an answer that was continued, engines noted the last part
            assert any(
                versions[-len(record["versions"]) :] == record["versions"] for record in said[t.episode_id]
            )
            assert np.all(np.diff(t.versions[sampled]) >= 0), "a version never goes down"
            assert t.reward == float(int(tokens.sum()) % 3 == 0)
        assert list(groups) == [group_id(index) for index in batch.indices], "in batch order"
        for members in groups.values():
            rewards = np.array([s.trajectory.reward for s in members])
            lengths = [int(s.trajectory.loss_mask.sum()) for s in members]
            expected = Algorithm(scene.config.algorithm).group_advantages(rewards, lengths)
            for sample, advantage in zip(members, expected, strict=True):
                on = np.where(sample.trajectory.loss_mask, advantage, 0.0)
                np.testing.assert_array_equal(sample.advantages, on.astype(np.float32))


def check_once(scene: Scene, steps: int, prompts_per_step: int) -> None:
    """Every admitted group was trained on once or dropped once; every step had a whole batch."""
    trained = [index for batch in scene.trained() for index in batch.indices]
    assert len(trained) == steps * prompts_per_step
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    assert all(len(batch.indices) == prompts_per_step for batch in scene.trained())
    counts = scene.counts()
    assert (counts["version"], counts["running"]) == (steps, 0)
    assert (counts["trained"], counts["kept"]) == (len(trained), 0), (
        "a group was admitted that no step was left for"
    )
    said = {name.partition("/")[0] for name in scene.said()}
    assert len(said) == len(trained) + counts["dropped"], "a group was neither trained on nor dropped"
    stats = scene.flows.samples.stats()
    assert (stats["depth"], stats["leased"]) == (0, 0), "samples were left behind"


def lags(trained: list[TrainedBatch]) -> list[int]:
    return [int(batch.version) - int(s.trajectory.oldest_version) for batch in trained for s in batch.samples]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("synchronous", {"max_lag": 0, "drop_equal": True}),
        ("ahead", {"max_lag": 2, "order": "admission", "drop_equal": True, "engines": "0-1"}),
        pytest.param(
            "first-come", {"max_lag": 1, "order": "completion", "engines": "0-1"}, marks=pytest.mark.slow
        ),
        ("streamed", {"max_lag": 0, "granularity": 3, "drop_equal": True}),
        pytest.param("apart", {"max_lag": 0, "env_workers": 2, "engines": "0-1"}, marks=pytest.mark.slow),
        ("apart-ahead", {"max_lag": 1, "order": "admission", "env_workers": 1, "granularity": 1}),
    ],
)
def test_what_the_engine_said_is_what_the_loss_gets_once(
    tmp_path: Path, cluster: Cluster, name: str, settings: dict[str, object]
) -> None:
    scene = Scene(tmp_path, cluster, name=name, steps=5, prompts_per_step=4, **settings)  # type: ignore[arg-type]
    scene.run()
    check_conserved(scene)
    check_once(scene, 5, 4)
    chunk = settings.get("granularity") or 4
    assert {tuple(batch.chunks) for batch in scene.trained()} == {
        tuple(min(chunk, 4 - at) for at in range(0, 4, chunk))  # type: ignore[call-overload,operator,type-var]
    }
    if settings.get("drop_equal"):
        dropped = sum(report.metrics.get("groups/dropped_equal_rewards", 0.0) for report in scene.reports)
        assert dropped > 0, "the scene was meant to drop groups and sample others"
    if settings["max_lag"] == 0 or settings.get("order") == "admission":
        assert max(lags(scene.trained())) <= settings["max_lag"]  # type: ignore[operator]


def test_new_weights_in_the_middle_of_a_sequence_show_in_its_versions(
    tmp_path: Path, cluster: Cluster
) -> None:
    slow = {"tick_s": 0.01, "max_delay_ticks": 5}
    scene = Scene(
        tmp_path,
        cluster,
        name="interrupted",
        steps=6,
        prompts_per_step=2,
        max_new_tokens=60,
        max_lag=2,
        order="admission",
        engine=slow,
    )
    scene.run()
    check_conserved(scene)
    check_once(scene, 6, 2)
    mixed = [
        s
        for batch in scene.trained()
        for s in batch.samples
        if len(np.unique(s.trajectory.versions[s.trajectory.loss_mask])) > 1
    ]
    assert mixed, "no sequence lived through an update: the scene is too quick"
    assert max(lags(scene.trained())) <= 2


def test_without_interruption_no_sequence_holds_two_versions(tmp_path: Path, cluster: Cluster) -> None:
    scene = Scene(
        tmp_path,
        cluster,
        name="finishing",
        steps=4,
        prompts_per_step=2,
        max_new_tokens=40,
        max_lag=1,
        interrupt=False,
        engine={"tick_s": 0.005, "max_delay_ticks": 5},
    )
    scene.run()
    check_conserved(scene)
    check_once(scene, 4, 2)
    for batch in scene.trained():
        for sample in batch.samples:
            t = sample.trajectory
            assert len(np.unique(t.versions[t.loss_mask])) == 1
