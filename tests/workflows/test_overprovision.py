"""More groups than a batch needs: the slowest are put back with their tokens and go on under newer weights."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rill.runtime.cluster import Cluster
from rill.types import NOT_SAMPLED
from rill.workflows.rollout import Serving
from rill.workflows.sections import LoopConfig
from tests.workflows.scene import Scene
from tests.workflows.scripted_engine import request_of
from tests.workflows.test_conservation import check_once

LONG_TAILED = {"tick_s": 0.004, "max_delay_ticks": 40}


def check_parts(scene: Scene) -> int:
    """Every trained answer is the parts that the engines said, one after the other, and every part is in an answer.
    Returns how many answers have several parts."""
    said = {name: sorted(parts, key=lambda part: part["at"]) for name, parts in scene.said().items()}
    num_continued = 0
    trained = set()
    for _, samples in scene.trained():
        for sample in samples:
            t = sample.trajectory
            parts = said[request_of(t)]
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
            trained.add(request_of(t))
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
    steps, groups, group_size = rng.randint(3, 6), rng.randint(1, 5), rng.randint(1, 4)
    scene = Scene(
        tmp_path,
        cluster,
        name=f"any-{seed}",
        engines=rng.choice(["0", "0-1"]),
        steps=steps,
        groups_per_step=groups,
        group_size=group_size,
        max_new_tokens=rng.randint(1, 60),
        drop_equal=group_size > 1 and rng.random() < 0.5,
        interrupt=rng.random() < 0.7,
        max_lag=max_lag,
        order=order,
        overprovision=spare,
        max_returns=rng.randint(1, 3),
        engine={"tick_s": 0.003, "max_delay_ticks": rng.randint(0, 40)},
    )
    scene.run()
    check_once(scene, steps, groups)
    check_parts(scene)
    lags = [report.metrics.get("lag/max", 0.0) for report in scene.reports]
    if order == "admission" or max_lag == 0:
        assert max(lags) <= scene.loop.config.largest_lag
    scene.close()


@pytest.mark.parametrize("engines", ["0", "0-1"], ids=["one engine", "two engines"])
def test_slow_groups_are_put_back_and_no_token_is_lost(
    tmp_path: Path, cluster: Cluster, engines: str
) -> None:
    scene = Scene(
        tmp_path,
        cluster,
        name=f"spare-{len(engines)}",
        engines=engines,
        steps=6,
        groups_per_step=4,
        max_new_tokens=60,
        overprovision=0.5,
        engine=LONG_TAILED,
    )
    scene.run()
    check_once(scene, 6, 4)
    assert check_parts(scene) > 0, "the scene was meant to cut answers in two"
    assert sum(report.metrics.get("groups/put_back", 0.0) for report in scene.reports) > 0
    assert max(report.metrics.get("lag/max", 0.0) for report in scene.reports) >= 1
    scene.close()


def test_a_run_that_stops_goes_on_with_what_was_put_back(tmp_path: Path, cluster: Cluster) -> None:
    settings = {"steps": 5, "groups_per_step": 3, "max_new_tokens": 60, "overprovision": 1.0}
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
    again.close()


class StoppingPolicy:
    def put_back(self) -> list[str]:
        return ["r1"]


class AbortingEngine:
    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def test_what_is_put_back_in_the_moment_generation_ends_waits_for_nothing() -> None:
    """The event loop is asked and ends before it gets to it: the answer must come all the same."""
    engine = AbortingEngine()

    async def generate() -> threading.Thread:
        serving = Serving(1, StoppingPolicy(), asyncio.get_running_loop())  # type: ignore[arg-type]
        caller = threading.Thread(target=serving.put_back, args=(engine, 600.0), daemon=True)
        caller.start()
        while not serving._asked:
            time.sleep(0.001)  # the loop stands still, as in a long turn of something else
        serving.end()
        serving.put_back(engine, 600.0)  # type: ignore[arg-type]
        caller.join(10.0)
        return caller

    caller = asyncio.run(generate())
    assert not caller.is_alive() and engine.aborted == []


def test_it_is_refused_where_engines_run_ahead_anyway() -> None:
    with pytest.raises(ValueError, match="for max_lag = 0"):
        LoopConfig(overprovision=0.5, max_lag=1)
