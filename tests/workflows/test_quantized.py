"""A recipe whose rollouts are quantised: what changes by itself, that what a recipe says wins, and that it learns."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rill.config import load_recipe, resolve
from rill.telemetry.metrics import read_metrics
from rill.workflows import recipe_schema

FP8 = "rollout.engine.quantization=fp8"
INT4 = "rollout.engine.quantization=int4"


def config_of(*changes: str) -> Any:
    values = load_recipe("demo", list(changes))
    return resolve(recipe_schema(values.values, "demo"), values.values, values.provenance)


@pytest.mark.parametrize("change", [FP8, "rollout.engine.kv_cache_dtype=fp8"])
def test_tokens_sampled_in_8_bits_are_weighed_unless_the_recipe_says_otherwise(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert config_of().algorithm.correction.type == "none"
    with caplog.at_level(logging.INFO):
        assert config_of(change).algorithm.correction.type == "tis"
    assert "algorithm.correction = 'tis'" in caplog.text
    assert config_of(change, "algorithm.correction=none").algorithm.correction.type == "none"
    assert config_of(change, "algorithm.correction=mis").algorithm.correction.type == "mis"
    # A loss that holds the ratio itself needs no correction, and may have none.
    assert config_of(change, "algorithm.loss=decoupled").algorithm.correction.type == "none"


def test_guard_and_canary_allow_for_8_bits() -> None:
    def limit(config: Any) -> str:
        return next(str(g.expected) for g in config.guards() if g.name == "mismatch")

    plain, quantized = config_of(), config_of(FP8)
    assert "0.001" in limit(plain) and "0.15" in limit(quantized)
    assert (plain.sync.canary_tolerance, quantized.sync.canary_tolerance) == (0.0, 0.5)
    assert config_of(FP8, "sync.canary_tolerance=0.1").sync.canary_tolerance == 0.1


def test_training_in_8_bits_is_corrected_as_rollouts_are() -> None:
    config = config_of("trainer.fp8=true")
    assert config.is_quantized and config.sync.canary_tolerance == 0.5
    assert config.algorithm.correction.type == "tis"
    assert config_of("trainer.fp8=false").algorithm.correction.type == "none"


def test_one_switch_makes_the_trainer_compute_with_4_bits_too() -> None:
    config = config_of(INT4)
    assert config.trainer.quantization_aware == "int4" and not config.is_quantized
    assert config.algorithm.correction.type == "tis" and config.sync.canary_tolerance == 0.0
    assert config_of().trainer.quantization_aware is None


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "changes",
    [(FP8, "rollout.engine.kv_cache_dtype=fp8"), (INT4,), ("trainer.fp8=true",)],
    ids=["fp8", "int4", "trained in fp8"],
)
def test_the_demo_learns_with_quantised_rollouts(changes: tuple[str, ...], tmp_path: Path) -> None:
    """From below 40 % of held-out sums to above 85 %, which is what the demo promises without."""
    command = [
        sys.executable, "-m", "rill.cli.main", "train", "demo", *changes, "--name", "fp8", "--root", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [row.values for row in read_metrics(tmp_path / "fp8")]
    found = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert found[0] < 0.4 and found[-1] > 0.85, found
