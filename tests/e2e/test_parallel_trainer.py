"""However the trainer is cut, or the engine, an RL step ends with the weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_sft import assert_near
from tests.e2e.tiny import CORRECTED, INVARIANT, start

APART = ("cluster.devices=3", "placement.rollout=0", "loop.steps=1", INVARIANT, CORRECTED)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_data_tensor_and_context_parallel_trainers_take_the_step_of_one(tmp_path: Path) -> None:
    alone = start(tmp_path, "alone", *APART, "placement.actor=1")
    for settings in ("seed=3", "trainer.tensor_parallel=2", "trainer.context_parallel=2"):
        cut = start(tmp_path, settings.partition("=")[0], *APART, "placement.actor=1-2", settings)
        assert_near(cut, alone, 2e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_on_two_ranks_trains_to_the_weights_of_one(tmp_path: Path) -> None:
    """Over a publish, which the canary proves on the engine's answers."""
    alone = start(tmp_path, "alone", "loop.steps=2")
    spread = start(tmp_path, "spread", "loop.steps=2", "rollout.engine.tensor_parallel_size=2")
    assert_near(spread, alone, 2e-3)
